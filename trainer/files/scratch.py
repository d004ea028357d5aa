"""Makes scratch directories that other processes remove if their owner was killed. Torch-free.

The owner holds a lock on its directory (flock(2)). The kernel drops the lock when the process ends, in whatever way;
unlike a pid it is never mistaken for another's, and it means the same in every container of a host.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def hold(directory: Path) -> int:
    """Makes the directory, if needed, and keeps it from `sweep` until the returned descriptor is closed.

    It is also released when this process and its forks have ended. Several processes may hold the same directory.
    Raises OSError.
    """
    while True:
        directory.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):
            descriptor = os.open(directory, os.O_RDONLY)
            try:
                with suppress(OSError):  # on a file system without locks, nobody sweeps either
                    fcntl.flock(descriptor, fcntl.LOCK_SH)
                if os.path.samestat(os.fstat(descriptor), directory.stat()):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # another process has swept it, and it was made anew


def sweep(directories: Iterable[Path]) -> None:
    """Removes the directories that nobody holds; those that cannot be locked or removed from here stay."""
    for directory in directories:
        with suppress(OSError):
            descriptor = os.open(directory, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
            finally:
                os.close(descriptor)


@contextmanager
def temporary(prefix: str) -> Iterator[Path]:
    """Yields a new directory in TMPDIR for the duration of the block.

    Directories with this prefix that killed processes have left are removed first. Raises OSError.
    """
    among = Path(tempfile.gettempdir())
    sweep(among.glob(f"{prefix}*"))
    directory = among / f"{prefix}{uuid.uuid4().hex}"
    descriptor = hold(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(descriptor)
