"""Runs another program so that nothing of it outlives the process that asked for it.

    python -m hpo.tracking.supervise MODULE ARGUMENT...

The kernel's death signal does not reach what a program starts in its turn, such as the workers of a server. So this
process stands between: it leads the session that they all belong to, and ends the whole of it once its own parent is
gone, however that died. What the program prints passes through it, so that no password gets into a log.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence

from hpo.child_process import orphaned
from hpo.terminal import print
from trainer.redaction import redacted

_LOOK = 0.2  # seconds between looks for the parent


def main(command: Sequence[str]) -> int:
    """The exit code of `python -m MODULE ARGUMENT...`. Signals to the group are the program's affair."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    program = subprocess.Popen(
        [sys.executable, "-P", "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    printer = threading.Thread(target=_print, args=(program.stdout,), daemon=True)
    printer.start()
    while True:
        try:
            code = program.wait(_LOOK)
            printer.join(_LOOK)  # what it has started may hold its output open
            return code
        except subprocess.TimeoutExpired:
            if orphaned():
                os.killpg(os.getpgrp(), signal.SIGKILL)


def _print(output: Iterable[str]) -> None:
    for line in output:
        print(redacted(line), end="", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
