"""Checks the disk of a home, or the disk where it would be created."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hpo.doctor.finding import Finding
from hpo.door import option
from hpo.errors import UserError
from hpo.ledger.database.store import NETWORK_FILESYSTEMS, backend, filesystem_of
from hpo.storage.home import Home
from hpo.text import megabytes

LEAST, LITTLE = 100e6, 2e9  # bytes free: below LEAST a checkpoint may not fit, below LITTLE a study may fill the disk
SLOW = 0.05  # seconds of a sync; each report waits for one
PROBES = 5


def room(home: Home) -> Iterator[Finding]:
    """Yields the free space, in bytes and in files."""
    directory = existing(home.root)
    free, total = shutil.disk_usage(directory).free, shutil.disk_usage(directory).total
    text = f"{megabytes(free)} of {megabytes(total)} free at {directory}"
    ways = f"`hpo gc` drops checkpoints of ended trials, {option('max_bytes')} bounds them"
    fix = f"{ways}; or choose another {option('home')}."
    yield Finding("disk", "fails" if free < LEAST else "note" if free < LITTLE else "ok", text, fix * (free < LITTLE))
    files = os.statvfs(directory)
    if files.f_files and files.f_favail < 1000:
        text = f"room for {files.f_favail} more files at {directory}"
        yield Finding("disk", "fails", text, f"remove files there, or choose another {option('home')}.")


def filesystem(home: Home, storage: str | None) -> Iterator[Finding]:
    """Yields the kind of file system: SQLite needs a local one."""
    directory = existing(home.root)
    kind = filesystem_of(directory)
    try:
        local = backend(storage or home.storage) == "sqlite"
    except UserError:  # the check of the ledger reports it
        local = False
    if kind in NETWORK_FILESYSTEMS and local:
        fix = f"choose a {option('home')} on a local disk, or {option('storage', 'postgresql+psycopg://...')}"
        yield Finding("disk", "fails", f"{directory} lies on {kind}, where SQLite's WAL is unsafe", fix)
    elif kind in ("tmpfs", "ramfs"):
        yield Finding(
            "disk",
            "note",
            f"{directory} lies on {kind}: it is gone when the host ends",
            f"choose another {option('home')}.",
        )
    elif kind:
        yield Finding("disk", "ok", f"{directory} lies on {kind}")


def sync_speed(home: Home) -> Iterator[Finding]:
    """Yields the median time until 4 KiB are durable; each report waits for that once."""
    directory = existing(home.root)
    times = []
    try:
        with tempfile.TemporaryFile(dir=directory) as probe:
            for _ in range(PROBES):
                began = time.perf_counter()
                probe.write(bytes(4096))
                probe.flush()
                os.fsync(probe.fileno())
                times.append(time.perf_counter() - began)
    except OSError as error:
        fix = f"free room there, make it writable, or choose another {option('home')}."
        yield Finding("disk", "fails", f"{directory} cannot be written ({error.strerror})", fix)
        return
    took = statistics.median(times)
    text = f"a sync takes {1000 * took:.1f} ms at {directory}"
    if took > SLOW:
        yield Finding(
            "disk",
            "note",
            text,
            f"trials of short epochs will wait for it: choose a {option('home')} on a faster disk.",
        )
    else:
        yield Finding("disk", "ok", text)


def existing(path: Path) -> Path:
    """Returns the directory itself, or its nearest parent that exists."""
    return next(directory for directory in (path, *path.parents) if directory.is_dir())
