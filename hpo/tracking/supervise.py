"""Runs another program so that nothing of it outlives the process that asked for it.

    python -m hpo.tracking.supervise MODULE ARGUMENT...

The kernel's death signal does not reach what a program starts in its turn, such as the workers of a server. So this
process stands between: it leads the session that they all belong to, and ends the whole of it once its own parent is
gone, however that died.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from hpo.child_process import orphaned

_LOOK = 0.2  # seconds between looks for the parent


def main(command: Sequence[str]) -> int:
    """The exit code of `python -m MODULE ARGUMENT...`. Signals to the group are the program's affair."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    program = subprocess.Popen([sys.executable, "-P", "-m", *command])
    while True:
        try:
            return program.wait(_LOOK)
        except subprocess.TimeoutExpired:
            if orphaned():
                os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
