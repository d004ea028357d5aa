"""Checks the limits that this host sets for a process."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from hpo.doctor.finding import Finding
from hpo.door import option
from hpo.text import megabytes
from hpo.workers.executors.resources import CGROUP, container_memory

FEWEST_FILES, FEW_FILES = 128, 1024  # a driver and MLflow's server open more than the first
FEWEST_PROCESSES = 64  # threads count
SMALL_SHARED = 256e6


def open_files() -> Iterator[Finding]:
    """Yields the number of files that a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_bound(soft, 'open files')} per process, of {_bound(hard, 'files')} that it may ask for"
    low = 0 <= soft < FEW_FILES
    fix = "ulimit -n 4096 before hpo, or LimitNOFILE= of its systemd unit." if low else ""
    yield Finding("limits", "fails" if 0 <= soft < FEWEST_FILES else "note" if low else "ok", text, fix)


def processes() -> Iterator[Finding]:
    """Yields the number of processes and threads that the user may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    low = 0 <= soft < FEWEST_PROCESSES and os.geteuid() != 0  # the limit does not apply to root
    fix = "ulimit -u 4096, or TasksMax= of the systemd unit." if low else ""
    yield Finding("limits", "fails" if low else "ok", f"{_bound(soft, 'processes')} and threads of this user", fix)


def shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """Yields the free space of /dev/shm, which NCCL and Ray's object store use; Docker provides only 64 MB."""
    if not path.is_dir():
        yield Finding("limits", "note", f"there is no {path}", "NCCL and Ray need it: mount a tmpfs there.")
        return
    free = shutil.disk_usage(path).free
    low = free < SMALL_SHARED
    fix = "several GPUs and Ray need more: docker run --shm-size 8g." if low else ""
    yield Finding("limits", "note" if low else "ok", f"{megabytes(free)} free in {path}", fix)


def container(root: Path = CGROUP) -> Iterator[Finding]:
    """Yields the memory and cores that a container may use (cgroup v2: memory.max, cpu.max)."""
    cpu = _read(root / "cpu.max").split()
    if memory := container_memory(root):
        left = memory[0] - memory[1]
        text = f"the container has {megabytes(memory[0])} of memory, {megabytes(left)} of it free"
        fix = "a worker takes half a gigabyte before its model, and one over the bound is killed: raise it."
        yield Finding("limits", "fails" if left < 5e8 else "ok", text, fix * (left < 5e8))
    if len(cpu) == 2 and cpu[0].isdigit():
        cores = int(cpu[0]) / int(cpu[1])
        few = cores < (os.cpu_count() or 1)
        fix = f"more {option('workers')} than {max(int(cores), 1)} slow each other down." if few else ""
        yield Finding("limits", "note" if few else "ok", f"the container has {cores:g} cores", fix)


def _bound(count: int, nouns: str) -> str:
    return f"any number of {nouns}" if count == resource.RLIM_INFINITY else f"{count} {nouns}"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # cgroup v1, or not Linux
        return ""
