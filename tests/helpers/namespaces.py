"""Puts a process on another host: into a network namespace that `ip netns add` has made, with a hostname and files of
/etc of its own.

A process whose environment has HOST begins there, and so does all that it starts (`warm` sees to it). What is not warm
begins by this file: `python namespaces.py COMMAND...` enters, and becomes the command.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HOST = "TEST_HOST"  # the variable that names the namespace
_NEW_MOUNTS, _NEW_HOSTNAME, _NEW_NETWORK = 0x00020000, 0x04000000, 0x40000000  # of sched.h
_BIND, _RECURSIVE, _SLAVE = 0x1000, 0x4000, 0x80000  # of sys/mount.h


def enter(name: str) -> None:
    """Moves this process, which has one thread, to the host `name`; as `ip netns exec`, and with a hostname besides."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *arguments: object) -> None:
        if getattr(libc, function)(*arguments):
            raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}", name)

    with open(_space(name)) as space:
        call("setns", space.fileno(), _NEW_NETWORK)
    call("unshare", _NEW_MOUNTS | _NEW_HOSTNAME)
    socket.sethostname(name)
    call("mount", b"none", b"/", None, ctypes.c_ulong(_RECURSIVE | _SLAVE), None)
    for file in Path("/etc/netns", name).iterdir():
        call("mount", os.fsencode(file), os.fsencode(f"/etc/{file.name}"), None, ctypes.c_ulong(_BIND), None)


def away(environ: Mapping[str, str]) -> str:
    """Returns the host of this environment, or an empty text if it names none or this process is on it already."""
    name = environ.get(HOST, "")
    return name if name and os.stat("/proc/self/ns/net").st_ino != os.stat(_space(name)).st_ino else ""


def command(words: Sequence[str]) -> list[str]:
    """Returns the command line that enters the host of its environment and becomes the given one."""
    return [sys.executable, "-ISs", __file__, *words]


def _space(name: str) -> str:
    return f"/run/netns/{name}"


if __name__ == "__main__":
    enter(os.environ[HOST])
    os.execvp(sys.argv[1], sys.argv[1:])
