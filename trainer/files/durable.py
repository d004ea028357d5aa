"""Files that survive a power cut, and their digests. Torch-free."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sha256(path: Path) -> str:
    """The sha256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make a file's bytes, or a directory's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def on_disk(directory: Path) -> dict[tuple[int, int], int]:
    """Bytes of each file in a directory, by the file itself: several names of one, wherever they are, are one file."""
    found = (path.stat() for path in directory.rglob("*") if not path.is_dir()) if directory.is_dir() else ()
    return {(stat.st_dev, stat.st_ino): stat.st_size for stat in found}


def write_text(target: Path, text: str) -> None:
    """Make `text` the content of `target`, durably and at once; whoever reads it sees the old or the new."""
    with replacing(target) as temporary:
        temporary.write_text(text)
        sync(temporary)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary name that becomes `target` at the end of the block, and is gone where that raises; one process at a
    time may write a target."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(target.parent)
