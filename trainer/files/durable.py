"""Writes files that survive a power cut, and computes digests. Torch-free."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sha256(path: Path) -> str:
    """Returns the sha256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Makes a file's bytes, or a directory's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def on_disk(directory: Path) -> dict[tuple[int, int], int]:
    """Returns the bytes of each file in a directory, by device and inode: all hard links of a file count as one."""
    stats = (path.stat() for path in directory.rglob("*") if not path.is_dir()) if directory.is_dir() else ()
    return {(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}


def write_text(target: Path, text: str) -> None:
    """Makes `text` the content of `target`, durably and atomically: readers see the old or the new text."""
    with replacing(target) as temporary:
        temporary.write_text(text)
        sync(temporary)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yields a temporary path that becomes `target` at the end of the block, or is removed if the block raises.

    One process at a time may write a target.
    """
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
