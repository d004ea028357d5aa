"""The disk that a home lies on, or would."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hpo.doctor.finding import Finding
from hpo.errors import UserError
from hpo.ledger.store import NETWORK_FILESYSTEMS, backend, filesystem_of
from hpo.storage.home import Home
from hpo.text import megabytes

LEAST, LITTLE = 100e6, 2e9  # bytes free: below, a checkpoint may not fit; below, a study may fill it
SLOW = 0.05  # seconds of a sync: each report waits for one
PROBES = 5


def room(home: Home) -> Iterator[Finding]:
    """How much is free, in bytes and in files."""
    place = existing(home.root)
    free, total = shutil.disk_usage(place).free, shutil.disk_usage(place).total
    text = f"{megabytes(free)} of {megabytes(total)} free at {place}"
    fix = "`hpo gc` drops checkpoints of ended trials, --max-bytes bounds them; or choose another --home."
    yield Finding("disk", "fails" if free < LEAST else "note" if free < LITTLE else "ok", text, fix * (free < LITTLE))
    files = os.statvfs(place)
    if files.f_files and files.f_favail < 1000:
        text = f"room for {files.f_favail} more files at {place}"
        yield Finding("disk", "fails", text, "remove files there, or choose another --home.")


def filesystem(home: Home, storage: str | None) -> Iterator[Finding]:
    """Its kind: SQLite needs a local one."""
    place = existing(home.root)
    kind = filesystem_of(place)
    try:
        local = backend(storage or home.storage) == "sqlite"
    except UserError:  # which is told of the ledger
        local = False
    if kind in NETWORK_FILESYSTEMS and local:
        fix = "choose a --home on a local disk, or --storage postgresql+psycopg://..."
        yield Finding("disk", "fails", f"{place} lies on {kind}, where SQLite's WAL is unsafe", fix)
    elif kind in ("tmpfs", "ramfs"):
        yield Finding(
            "disk", "note", f"{place} lies on {kind}: it is gone when the host ends", "choose another --home."
        )
    elif kind:
        yield Finding("disk", "ok", f"{place} lies on {kind}")


def sync_speed(home: Home) -> Iterator[Finding]:
    """How long it takes until 4 KiB are durable, in the median of a few: each report waits for that once."""
    place = existing(home.root)
    times = []
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            for _ in range(PROBES):
                began = time.perf_counter()
                probe.write(bytes(4096))
                probe.flush()
                os.fsync(probe.fileno())
                times.append(time.perf_counter() - began)
    except OSError as error:
        fix = "free room there, make it writable, or choose another --home."
        yield Finding("disk", "fails", f"{place} cannot be written ({error.strerror})", fix)
        return
    took = statistics.median(times)
    text = f"a sync takes {1000 * took:.1f} ms at {place}"
    if took > SLOW:
        yield Finding(
            "disk", "note", text, "trials of short epochs will wait for it: choose a --home on a faster disk."
        )
    else:
        yield Finding("disk", "ok", text)


def existing(path: Path) -> Path:
    """The directory itself, or the nearest above it that is there."""
    return next(one for one in (path, *path.parents) if one.is_dir())
