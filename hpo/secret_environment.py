"""Keeps settings with passwords from trials and from every process that a trial starts.

A variable deleted from the environment is still visible in /proc/PID/environ, where the kernel shows the memory that
the process was started with. So that memory is overwritten too.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

NAMES = (
    "HPO_STORAGE",
    "HPO_TRACKING_URI",
    "HPO_SMTP",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "PGPASSWORD",
)
_ENV_START, _ENV_END = 47, 49  # a slice of the fields of /proc/PID/stat that follow the name of the program


@contextmanager
def withheld() -> Iterator[None]:
    """Runs the block, and every process that it starts, without the variables of NAMES."""
    before = {name: os.environ.pop(name) for name in NAMES if name in os.environ}
    _overwrite()
    try:
        yield
    finally:
        os.environ.update(before)


def without(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the variables of NAMES."""
    return {name: value for name, value in environ.items() if name not in NAMES}


def _overwrite() -> None:
    """Overwrites the variables of NAMES in the memory that the process was started with; nothing else may use them."""
    if sys.platform != "linux":
        return
    block = Path("/proc/self/environ").read_bytes()
    stat = Path("/proc/self/stat").read_text()
    start, end = (int(field) for field in stat[stat.rindex(")") + 2 :].split()[_ENV_START:_ENV_END])
    if end - start != len(block):
        return  # a kernel that does not tell where this memory is
    for variable in block.split(b"\0"):
        if os.fsdecode(variable.partition(b"=")[0]) in NAMES:
            ctypes.memset(start, 0, len(variable))
        start += len(variable) + 1
