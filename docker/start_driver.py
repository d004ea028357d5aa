"""Runs `hpo` as the driver's container does: Compose restarts a container whatever its exit code says.

What a restart does not help ends `hpo run` and `hpo resume` with 2, 3 or 5 (docs/guide/run.md). The container then ends
with 0, so that Compose leaves it, and its log says which code it was. Any other code is the container's own. Signals go
to `hpo`.
"""

from __future__ import annotations

import signal
import subprocess
import sys

HOPELESS = {
    2: "the command is wrong",
    3: "another process drives the study",
    5: "the study's failures have stopped it",
}


def main(command: list[str]) -> int:
    process = subprocess.Popen(command)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: process.send_signal(number))
    code = process.wait()
    if code in HOPELESS and command[1:2] in (["run"], ["resume"]):
        print(f"driver: {HOPELESS[code]} (exit code {code}): the container is not started again.", file=sys.stderr)
        return 0
    return 128 - code if code < 0 else code  # as shells spell the end by a signal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
