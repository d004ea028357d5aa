"""Identifies a process so that another one on the same host can tell whether it still lives."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_MACHINE = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))


@dataclass(frozen=True)
class Process:
    """A process: its host, pid, and start time, which distinguishes a recycled pid. `id` is random per instance."""

    host: str
    pid: int
    started: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def current(cls) -> Process:
        return cls(socket.gethostname(), os.getpid(), start_time(os.getpid()) or "")


def start_time(pid: int) -> str | None:
    """Returns when `pid` started, as a token that never changes while it lives; None if no process with it lives.

    On Linux the token is `_here()` and the kernel's clock ticks, which no adjustment of the wall clock changes.
    """
    if Path("/proc/self/stat").exists():
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = stat[stat.rindex(b")") + 2 :].split()  # the command's name may hold spaces and parentheses
        if fields[0] in (b"Z", b"X"):
            return None
        return f"{_here()}:{int(fields[19])}"
    import psutil

    try:
        return repr(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


@cache
def _here() -> str:
    """Returns the scope of a pid: machine and PID namespace, and, after the slash, the boot.

    Containers and clones with one hostname differ in the namespace.
    """
    machine = next((path.read_text()[:8] for path in _MACHINE if path.exists()), "")
    namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{machine}.{namespace}/{Path('/proc/sys/kernel/random/boot_id').read_text()[:8]}"


def is_dead(host: str, pid: int, started: str) -> bool:
    """Returns True only if it is certain: the process was on this host, in this boot or an earlier one, and is gone."""
    me = start_time(os.getpid()) or ""
    near = host == socket.gethostname() and started.rpartition("/")[0] == me.rpartition("/")[0]
    return near and start_time(pid) != started
