"""Runs another program so that none of its processes outlives the process that started this one.

    python -m hpo.tracking.ui.supervise MODULE ARGUMENT...

The kernel's death signal does not reach a program's own children, such as the workers of a server. So this process
leads their common session, and ends the whole session once its own parent is gone, however it died. The program's
output passes through it, so that no password gets into a log.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

from hpo.child_process import orphaned
from hpo.terminal import print
from trainer.redaction import redacted

_LOOK = 0.2  # seconds between looks for the parent
_GRACE = 10.0  # seconds to end by itself, as by freeing its leases


def main(command: Sequence[str]) -> int:
    """Returns the exit code of `python -m MODULE ARGUMENT...`. The program handles signals to the group itself."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
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
            printer.join(_LOOK)  # processes that it has started may keep its output open
            return code
        except subprocess.TimeoutExpired:
            if orphaned():
                os.killpg(os.getpgrp(), signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    program.wait(_GRACE)
                os.killpg(os.getpgrp(), signal.SIGKILL)


def _print(output: Iterable[str]) -> None:
    for line in output:
        print(redacted(line), end="", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
