"""Where checkpoints lie: in directories of a file system, or in an object store. Torch-free.

A checkpoint is named by its path in either case. In an object store its files lie under keys that say the same; on this
host is no more of it than a save that is under way, or a copy while it is read.
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

from trainer.checkpoint import copied
from trainer.checkpoint.manifest import MANIFEST, evaluated, files_of
from trainer.files import scratch
from trainer.files.durable import on_disk, sync
from trainer.files.s3 import Bucket

COPY = "hpo-checkpoint-"  # what the names of copies begin with


class Disk:
    """Each is the directory at its path."""

    def shown(self, path: Path) -> str:
        """The path, as users know it."""
        return str(path)

    def begin(self, tmp: Path) -> None:
        """Make the directory of a save that is under way. Raises OSError."""
        tmp.mkdir(exist_ok=True)

    def send(self, tmp: Path, path: Path, names: Iterable[str]) -> None:
        """These files of the checkpoint that will be at `path` are durable in `tmp`. Raises OSError."""

    def publish(self, tmp: Path, path: Path) -> None:
        """All files of it are there, and the manifest is in `tmp`: it is at `path` from now on. Raises OSError."""
        tmp.rename(path)
        sync(path.parent)

    @contextmanager
    def opened(self, path: Path, sha256: str | None, *, weights_alone: bool = False) -> Iterator[Path]:
        """A directory with what there is of the checkpoint while the block lasts: where the manifest has this sha256,
        all of it, or the weights that were evaluated. Raises CheckpointError."""
        yield path

    def is_there(self, path: Path) -> bool:
        """Whether it has not been taken away from outside, as far as that is told without asking anybody."""
        return path.is_dir()

    def sizes(self, path: Path, size: int) -> Mapping[Any, int]:
        """Bytes of each of its files, `size` in all, by what tells them from those of others that share them."""
        return on_disk(path)

    def entries(self, directory: Path) -> list[Path]:
        """What lies in a directory."""
        return sorted(directory.iterdir()) if directory.is_dir() else []

    def discard(self, path: Path) -> None:
        """Remove a checkpoint, or what there is of it. Raises OSError."""
        with suppress(FileNotFoundError):
            shutil.rmtree(path)

    def set_aside(self, path: Path) -> Path:
        """Mark a checkpoint as damaged; where it lies now."""
        corrupt = path.with_name(f"{path.name}.corrupt")
        try:
            path.rename(corrupt)
        except OSError:
            return path  # gone, or on a disk that takes no changes; either way it is not loaded again
        return corrupt

    # Files that trials hand over

    def share(self, path: Path) -> None:
        """A file is durable at `path`: let others have it. Raises OSError."""

    def here(self, path: Path) -> Path:
        """The file, on this host, if there is one. Raises OSError."""
        return path

    def files(self, directory: Path) -> set[str]:
        """All files below a directory, relative to it. Raises OSError."""
        found = directory.rglob("*") if directory.is_dir() else ()
        return {str(path.relative_to(directory)) for path in found if path.is_file()}

    def remove(self, path: Path) -> None:
        """Remove a file. Raises OSError."""
        path.unlink(missing_ok=True)


DISK = Disk()


class ObjectStore(Disk):
    """In a bucket: what would lie below `root` has the same names there. Its methods raise files.s3.Unavailable,
    which is a CheckpointError and an OSError."""

    def __init__(self, bucket: Bucket, root: Path) -> None:
        self.bucket, self.root = bucket, root
        self._release: Callable[[], object] = lambda: None  # of the directory of this process's last save

    def _key(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def shown(self, path: Path) -> str:
        return f"{self.bucket.url}/{self._key(path)}"

    def begin(self, tmp: Path) -> None:
        """What killed saves of the study's trials have left on this host goes, and the directory of this rank's last
        one, if rank 0 is elsewhere."""
        release, self._release = self._release, weakref.finalize(self, os.close, scratch.hold(tmp))
        release()
        scratch.sweep(tmp.parent.parent.glob("*/step-*.tmp"))

    def send(self, tmp: Path, path: Path, names: Iterable[str]) -> None:
        """Keeps no copy here."""
        for name in names:
            self.bucket.upload(tmp / name, f"{self._key(path)}/{name}")
            (tmp / name).unlink()

    def publish(self, tmp: Path, path: Path) -> None:
        self.bucket.put_new(f"{self._key(path)}/{MANIFEST}", (tmp / MANIFEST).read_bytes())
        shutil.rmtree(tmp, ignore_errors=True)

    @contextmanager
    def opened(self, path: Path, sha256: str | None, *, weights_alone: bool = False) -> Iterator[Path]:
        with scratch.temporary(COPY) as copy:
            self._fetch(path, copy, sha256, weights_alone)
            yield copy

    def _fetch(self, path: Path, target: Path, sha256: str | None, weights_alone: bool) -> None:
        """What is missing or damaged is for who reads the copy to tell."""
        raw = self.bucket.get(f"{self._key(path)}/{MANIFEST}")
        if raw is None:
            return
        (target / MANIFEST).write_bytes(raw)
        if sha256 is not None and hashlib.sha256(raw).hexdigest() != sha256:
            return
        manifest = json.loads(raw)
        names = manifest["files"]
        for name in names:
            copied.check_name(name)
        for name in files_of(evaluated(manifest["state"]), names) if weights_alone else names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            self.bucket.download(f"{self._key(path)}/{name}", target / name)

    def is_there(self, path: Path) -> bool:
        return True

    def sizes(self, path: Path, size: int) -> Mapping[Any, int]:
        return {path: size}

    def entries(self, directory: Path) -> list[Path]:
        there = {directory / name for name in self.bucket.entries(self._key(directory))}
        return sorted({*super().entries(directory), *there})

    def discard(self, path: Path) -> None:
        """Without its manifest first it is none any more."""
        self.bucket.remove(self._key(path), first=MANIFEST)
        super().discard(path)

    def set_aside(self, path: Path) -> Path:
        """Nothing is renamed there: an empty object beside it says so."""
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
