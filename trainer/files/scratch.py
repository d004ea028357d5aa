"""Makes scratch directories, which a killed process leaves to others to remove. Torch-free.

Who uses one holds a lock on it (flock(2)). The kernel drops that when the process ends, however it ends; unlike a pid
it is never taken for another's, and means the same in every container of a host.
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
    """Make the directory, if it is not there, and keep it from `sweep` until the descriptor returned is closed, or this
    process and those forked from it have ended. Several may hold one. Raises OSError."""
    while True:
        directory.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):
            held = os.open(directory, os.O_RDONLY)
            try:
                with suppress(OSError):  # where a file system has no locks, nobody sweeps either
                    fcntl.flock(held, fcntl.LOCK_SH)
                if os.path.samestat(os.fstat(held), directory.stat()):
                    return held
            except BaseException:
                os.close(held)
                raise
            os.close(held)  # another has swept it meanwhile, and somebody made it anew


def sweep(directories: Iterable[Path]) -> None:
    """Remove those that nobody holds; what cannot be locked or removed from here stays."""
    for directory in directories:
        with suppress(OSError):
            held = os.open(directory, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
            finally:
                os.close(held)


@contextmanager
def temporary(prefix: str) -> Iterator[Path]:
    """A new directory among those for temporary files (TMPDIR), while the block lasts. Those with this prefix that
    killed processes have left there are removed before. Raises OSError."""
    among = Path(tempfile.gettempdir())
    sweep(among.glob(f"{prefix}*"))
    directory = among / f"{prefix}{uuid.uuid4().hex}"
    held = hold(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(held)
