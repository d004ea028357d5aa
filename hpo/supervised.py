"""Supervises a process beside a driver, such as a mirror's, and asks that process to leave.

The driver has a `SupervisedProcess`, which starts the process, restarts it if it dies, and waits while it is active.
The process has a `Leave`: on SIGTERM it finishes its work and leaves; a second SIGTERM ends it at once. Its driver
sends SIGUSR1 for the first, so that a SIGTERM to all of a run's processes does not count as the second.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hpo.child_process import begin_logs, orphaned
from hpo.child_process import spawn as spawn_process
from hpo.clock import Backoff
from hpo.errors import HpoError
from hpo.terminal import print

T = TypeVar("T")
LEAVE = signal.SIGUSR1
SILENCE = 30.0  # seconds after which an inactive process is killed
POLL, MAX_PAUSE = 1.5, 30.0  # seconds between attempts: initial and maximum
_DEATHS_TOLD = 3  # in one run: more than a kill or an outage would cause


class SupervisedProcess:
    """A process that dies with this one, with its output in `log`; `start` starts it with further arguments."""

    def __init__(self, start: Callable[..., subprocess.Popen[bytes]], log: Path, what: str) -> None:
        self.start, self._log, self._what = start, log, what
        self._started = time.monotonic()
        self._deaths = 0
        self.process = start()

    @classmethod
    def of(
        cls, module: str, logs: Path, study: str, who: str, what: str, arguments: Sequence[str], **environ: str
    ) -> SupervisedProcess:
        """Starts `python -m module` for a study, its output in a log of this run. Secrets go through `environ`."""
        log = logs / f"{begin_logs(logs, study, who)}.{who}.log"
        words = ["--study", study, *arguments]
        return cls(lambda *more: spawn_process(module, [*words, *more], log, **environ), log, what)

    def kill(self) -> None:
        """Ends it at once; safe in a signal handler."""
        self.process.kill()

    def revive(self, *arguments: str, every: float = 0.0) -> str:
        """Restarts the process if it is dead, but no sooner than `every` seconds after its last start.

        Returns a notice for the user, once, that it dies repeatedly.
        """
        code = self.process.poll()
        if code is None or time.monotonic() - self._started < every:
            return ""
        self._started = time.monotonic()
        self.process = self.start(*arguments)
        self._deaths += 1
        if self._deaths != _DEATHS_TOLD:
            return ""
        return f"{self._what} has died {self._deaths} times, last with exit code {code}: see {self._log}."

    def finish(
        self,
        left: Callable[[], int],
        failed: Callable[[int], bool] = bool,
        tell: Callable[[int], object] = lambda left: None,
    ) -> None:
        """Lets the process finish its work and leave, for as long as it is active.

        `tell` gets each new count of what is left. Starts the process once more if it has `failed` by its exit code.
        """
        self.process.send_signal(LEAVE)
        self._await_end(left, tell)
        if failed(self.process.returncode):
            self.revive("--once")
            self._await_end(left, tell)

    def _await_end(self, left: Callable[[], int], tell: Callable[[int], object]) -> None:
        """Waits for the process to end; kills it after a long time without progress, reading, writing or computing."""
        before, since = (left(), _activity(self.process.pid)), time.monotonic()
        while True:
            try:
                self.process.wait(1.0)
                return
            except subprocess.TimeoutExpired:
                now = left(), _activity(self.process.pid)
                if now[0] != before[0]:
                    tell(now[0])
                if now != before:
                    before, since = now, time.monotonic()
                elif time.monotonic() - since > SILENCE:
                    self.process.kill()


def _activity(pid: int) -> tuple[str, ...]:
    """Returns figures that change while a process is active: its bytes read and written, and its processor time.

    They are empty without /proc. On a slow host a process may take minutes for the files of one trial, before the
    ledger shows progress.
    """
    try:
        used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]  # man proc: utime, stime
        return *used, Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return ()


class Leave:
    """Says when to leave: on SIGTERM, on LEAVE, or when the parent process dies.

    A second SIGTERM ends this process at once.
    """

    def __init__(self, now: bool) -> None:
        self.now = self._terminated = now
        signal.signal(LEAVE, self._left_alone)
        signal.signal(signal.SIGTERM, self._signalled)

    def _signalled(self, number: int, _: object) -> None:
        if self._terminated:
            os._exit(128 + number)
        self.now = self._terminated = True

    def _left_alone(self, number: int, _: object) -> None:
        self.now = True

    def __call__(self) -> bool:
        return self.now or orphaned()

    def wait(self, seconds: float) -> None:
        """Sleeps for `seconds`, but not past the time to leave."""
        end, leaving = time.monotonic() + seconds, self()
        while (left := end - time.monotonic()) > 0 and self() == leaving:
            time.sleep(min(left, 0.1))

    def until(self, attempt: Callable[[], T], error: type[HpoError], grace: float = 0.0) -> T:
        """Repeats the attempt until it does not raise `error`; raises that once it has been time to leave for `grace`
        seconds."""
        pause, end = Backoff(POLL, MAX_PAUSE), math.inf
        while True:
            try:
                return attempt()
            except error as reason:
                end = min(end, time.monotonic() + grace) if self() else math.inf
                if time.monotonic() >= end:
                    raise
                print(reason, flush=True)
                if end < math.inf:
                    pause.reset()
            self.wait(pause.seconds)
            pause.grow()
