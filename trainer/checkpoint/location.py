"""Stores checkpoints as directories of a file system, or in an object store. Torch-free.

A checkpoint is named by its path in either case. In an object store its files have the corresponding keys; this host
holds only a save in progress, or a copy while it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer.checkpoint import copied_files
from trainer.checkpoint.manifest import MANIFEST, evaluated, files_of
from trainer.files import scratch
from trainer.files.durable import on_disk, sync
from trainer.files.s3 import Bucket

COPY = "hpo-checkpoint-"  # prefix of the names of copies


class Disk:
    """Checkpoints as directories at their paths."""

    def shown(self, path: Path) -> str:
        """Returns the path as users know it."""
        return str(path)

    def begin(self, tmp: Path) -> None:
        """Makes the directory of a save in progress. Raises OSError."""
        tmp.mkdir(exist_ok=True)

    def send(self, tmp: Path, path: Path, names: Iterable[str]) -> None:
        """Stores files that are durable in `tmp`, of the checkpoint that will be at `path`. Raises OSError."""

    def publish(self, tmp: Path, path: Path) -> None:
        """Makes the checkpoint appear at `path`: all its files are stored, the manifest is in `tmp`. Raises OSError."""
        tmp.rename(path)
        sync(path.parent)

    @contextmanager
    def opened(self, path: Path, sha256: str | None, *, weights_only: bool = False) -> Iterator[Path]:
        """Yields a directory with the checkpoint's files for the duration of the block.

        It is complete, or has the weights that were evaluated, if the manifest has this sha256. Raises CheckpointError.
        """
        yield path

    def is_there(self, path: Path) -> bool:
        """Returns False if the checkpoint is known to be deleted; sends no request."""
        return path.is_dir()

    def sizes(self, path: Path, size: int) -> Mapping[Any, int]:
        """Returns the bytes of each of its files, `size` in all.

        The keys are equal for a file that checkpoints share.
        """
        return on_disk(path)

    def entries(self, directory: Path) -> list[Path]:
        """Returns the paths in a directory."""
        return sorted(directory.iterdir()) if directory.is_dir() else []

    def discard(self, path: Path) -> None:
        """Removes a checkpoint, or its remains. Raises OSError."""
        with suppress(FileNotFoundError):
            shutil.rmtree(path)

    def set_aside(self, path: Path) -> Path:
        """Marks a checkpoint as damaged; returns its new path."""
        corrupt = path.with_name(f"{path.name}.corrupt")
        try:
            path.rename(corrupt)
        except OSError:
            return path  # gone, or on a read-only disk; either way it is not loaded again
        return corrupt

    # Files that trials pass on

    def share(self, path: Path) -> None:
        """Makes a file that is durable at `path` available to other hosts. Raises OSError."""

    def here(self, path: Path) -> Path:
        """Returns the path of the file on this host, if it exists. Raises OSError."""
        return path

    def files(self, directory: Path) -> set[str]:
        """Returns all files below a directory, relative to it. Raises OSError."""
        paths = directory.rglob("*") if directory.is_dir() else ()
        return {str(path.relative_to(directory)) for path in paths if path.is_file()}

    def remove(self, path: Path) -> None:
        """Removes a file. Raises OSError."""
        path.unlink(missing_ok=True)


DISK = Disk()


class ObjectStore(Disk):
    """Checkpoints in a bucket, under the names that they would have below `root`.

    Its methods raise files.s3.Unavailable, which is a CheckpointError and an OSError.
    """

    def __init__(self, bucket: Bucket, root: Path) -> None:
        self.bucket, self.root = bucket, root
        self._release: Callable[[], object] = lambda: None  # releases the directory of this process's last save

    def _key(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def shown(self, path: Path) -> str:
        return f"{self.bucket.url}/{self._key(path)}"

    def begin(self, tmp: Path) -> None:
        """Removes the leftovers of killed saves of the study's trials on this host.

        Also removes the directory of this rank's last save, if rank 0 is on another host.
        """
        release, self._release = self._release, weakref.finalize(self, os.close, scratch.hold(tmp))
        release()
        scratch.sweep(tmp.parent.parent.glob("*/step-*.tmp"))

    def send(self, tmp: Path, path: Path, names: Iterable[str]) -> None:
        """Uploads the files and deletes the local ones."""
        for name in names:
            self.bucket.upload(tmp / name, f"{self._key(path)}/{name}")
            (tmp / name).unlink()

    def publish(self, tmp: Path, path: Path) -> None:
        self.bucket.put_new(f"{self._key(path)}/{MANIFEST}", (tmp / MANIFEST).read_bytes())
        shutil.rmtree(tmp, ignore_errors=True)

    @contextmanager
    def opened(self, path: Path, sha256: str | None, *, weights_only: bool = False) -> Iterator[Path]:
        with scratch.temporary(COPY) as copy:
            self._fetch(path, copy, sha256, weights_only)
            yield copy

    def _fetch(self, path: Path, target: Path, sha256: str | None, weights_only: bool) -> None:
        """Downloads the checkpoint; the reader of the copy reports files that are missing or damaged."""
        raw = self.bucket.get(f"{self._key(path)}/{MANIFEST}")
        if raw is None:
            return
        (target / MANIFEST).write_bytes(raw)
        if sha256 is not None and hashlib.sha256(raw).hexdigest() != sha256:
            return
        manifest = json.loads(raw)
        names = manifest["files"]
        for name in names:
            copied_files.check_name(name)
        for name in files_of(evaluated(manifest["state"]), names) if weights_only else names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            self.bucket.download(f"{self._key(path)}/{name}", target / name)

    def is_there(self, path: Path) -> bool:
        return True

    def sizes(self, path: Path, size: int) -> Mapping[Any, int]:
        return {path: size}

    def entries(self, directory: Path) -> list[Path]:
        stored = {directory / name for name in self.bucket.entries(self._key(directory))}
        return sorted({*super().entries(directory), *stored})

    def discard(self, path: Path) -> None:
        """Removes the manifest first, since without it the rest does not count as a checkpoint."""
        self.bucket.remove(self._key(path), first=MANIFEST)
        super().discard(path)

    def set_aside(self, path: Path) -> Path:
        """Marks it by an empty object next to it, since objects cannot be renamed."""
        corrupt = path.with_name(f"{path.name}.corrupt")
        self.bucket.put_new(self._key(corrupt), b"")
        return corrupt

    def share(self, path: Path) -> None:
        self.bucket.upload(path, self._key(path))
        path.unlink()

    def here(self, path: Path) -> Path:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self.bucket.download(self._key(path), path)  # written under another name, then renamed
        return path

    def files(self, directory: Path) -> set[str]:
        return set(self.bucket.keys(self._key(directory)))

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.bucket.delete(self._key(path))
