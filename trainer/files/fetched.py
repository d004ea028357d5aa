"""Keeps copies of objects from buckets in a directory of bounded size, which processes share. Torch-free.

A copy is locked (flock(2)) by whoever reads it, and while it is written. Where a new one needs room, those that were
used least recently and that nobody reads are removed first; if there are none, it waits for a reader to end.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from trainer.errors import ConfigError, DataError
from trainer.files import paths
from trainer.files.s3 import Away, Bucket, Unavailable

MOST_BYTES = 8 << 30  # unless said otherwise
_PART = ".part"
_PAUSE = 0.05  # seconds between two looks at a copy that another process makes


class Cache:
    """Copies of objects in `directory`, `most_bytes` of them together at most."""

    def __init__(self, directory: str | Path, most_bytes: int = MOST_BYTES) -> None:
        self.directory, self.most_bytes = Path(directory), most_bytes

    @contextmanager
    def opened(self, url: str, size: int, tag: str) -> Iterator[Path]:
        """Yields the path of a copy of s3://BUCKET/KEY with this size and entity tag, for the duration of the block.

        Raises DataError if the object has changed, ConfigError if it is larger than the cache, and Away.
        """
        if size > self.most_bytes:
            raise ConfigError(
                f"{url} has {size} bytes, and the cache of copies in {self.directory} holds {self.most_bytes}: give it "
                "more, or write smaller shards."
            )
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = hashlib.sha256(f"{url}\n{tag}\n{size}".encode()).hexdigest()[:32]
        copy = self.directory / f"{key}{PurePosixPath(url).suffix}"
        while (descriptor := _locked(copy, fcntl.LOCK_SH)) is None:
            if not self._fetch(url, size, tag, copy):
                time.sleep(_PAUSE)
        try:
            os.utime(copy)
            yield copy
        finally:
            os.close(descriptor)

    def _fetch(self, url: str, size: int, tag: str, copy: Path) -> bool:
        """Makes the copy; returns False, without it, while the directory is full or another process makes it."""
        part = copy.with_name(f".{copy.name}{_PART}")
        with self._alone():
            if copy.exists():
                return True
            if not self._made_room(size):
                return False
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                return False
            os.truncate(part, size)  # so that others count it
        with os.fdopen(descriptor, "r+b") as file:
            try:
                _copy(url, size, tag, part, file)
                os.replace(part, copy)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
        return True

    def _made_room(self, size: int) -> bool:
        files = []
        for path in self.directory.iterdir():
            with suppress(FileNotFoundError):
                if path.is_file():
                    files.append((path.stat().st_mtime_ns, path, path.stat().st_size))
        taken = sum(bytes_ for _, _, bytes_ in files)
        for _, path, bytes_ in sorted(files):
            if taken + size <= self.most_bytes:
                return True
            if path.name != _LOCK and (descriptor := _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)) is not None:
                path.unlink(missing_ok=True)
                os.close(descriptor)
                taken -= bytes_
        return taken + size <= self.most_bytes

    @contextmanager
    def _alone(self) -> Iterator[None]:
        descriptor = os.open(self.directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


_LOCK = ".lock"


def _locked(path: Path, how: int) -> int | None:
    """Returns a descriptor that locks the file, None if it is missing, or another process has locked it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, how)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass  # in use, or removed meanwhile
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _copy(url: str, size: int, tag: str, part: Path, file: BinaryIO) -> None:
    bucket, _, key = url.removeprefix(paths.BUCKET).partition("/")
    with as_data_error():
        copied_whole = Bucket(f"{paths.BUCKET}{bucket}").copy(key, tag, file)
    if not copied_whole:
        raise DataError(f"{url} has changed or is gone since it was listed: leave it as it is, and start again.")
    file.flush()
    if (copied := part.stat().st_size) != size:
        raise DataError(f"{url} has {copied} bytes, and was listed with {size}: leave it as it is, and start again.")


@contextmanager
def as_data_error() -> Iterator[None]:
    """Raises DataError for a bucket that cannot be read, which is a user's mistake; Away if it did not answer."""
    try:
        yield
    except Away:
        raise
    except Unavailable as error:
        raise DataError(str(error)) from error


@cache
def default() -> Cache:
    """Returns this user's cache in the directory for temporary files. Raises ConfigError if another user has it."""
    directory = Path(tempfile.gettempdir()) / f"hpo-shards-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise ConfigError(f"{directory} belongs to another user: set TMPDIR to a directory of your own.")
    return Cache(directory)
