"""`hpo doctor`: what is installed, what this host has and allows, what stands in a home, and what of it would fail.

    installation.py  whether the code is the one that its release recorded
    packages.py      python, packages against what is tested, extras
    devices.py       GPUs, processors and memory
    disk.py          room, file system and speed of the home's disk
    limits.py        open files, processes, shared memory, and the bounds of a container
    home.py          rights, schema, integrity and leases of a home; ledger and tracker that are elsewhere

Each check is a function that yields findings. Nothing is written but probes, which are removed.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpo.doctor import devices, disk, home, installation, limits, packages
from hpo.doctor.finding import Finding
from hpo.storage.home import Home

__all__ = ["Finding", "examine"]


def examine(at: Home, storage: str | None = None, tracking_uri: str | None = None) -> Iterator[Finding]:
    """Every finding, area by area."""
    yield from packages.interpreter()
    yield from installation.code()
    yield from packages.installed()
    yield from packages.extras()
    yield from devices.processors()
    yield from devices.accelerators()
    yield from disk.room(at)
    yield from disk.filesystem(at, storage)
    yield from disk.sync_speed(at)
    yield from limits.open_files()
    yield from limits.processes()
    yield from limits.shared_memory()
    yield from limits.container()
    yield from home.rights(at)
    yield from home.ledger(at, storage)
    yield from home.tracker(at, storage, tracking_uri)
