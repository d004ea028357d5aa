"""Implements `hpo doctor`, which checks the installation, this host and a home for what would fail.

    installation.py  compares the code with what its release recorded
    packages.py      Python, packages against the tested versions, extras
    devices.py       GPUs, processors and memory
    disk.py          room, file system and speed of the home's disk
    limits.py        open files, processes, shared memory, and the limits of a container
    home.py          rights, schema, integrity and leases of a home; its ledger and tracker, also on servers

Each check is a function that yields findings. The checks write only probes, and remove them.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpo.doctor import devices, disk, home, installation, limits, packages
from hpo.doctor.finding import Finding
from hpo.storage.home import Home

__all__ = ["Finding", "examine"]


def examine(at: Home, storage: str | None = None, tracking_uri: str | None = None) -> Iterator[Finding]:
    """Yields every finding, area by area."""
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
