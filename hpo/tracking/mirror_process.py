"""The mirror's process, which drains a study from the ledger to a tracker while the study runs.

    python -m hpo.tracking.mirror_process --study NAME --home DIR [--storage URL] [--tracking-uri URI] [--once]

Training never waits for a tracker and never calls one. While the tracker is away the mirror waits and looks again;
what is still missing when it must leave, `hpo sync` or the next run sends.

SIGTERM: send what is left, then leave. A second one: leave at once.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hpo.child_process import begin_logs, die_with_parent, orphaned
from hpo.child_process import spawn as spawn_process
from hpo.clock import SystemClock
from hpo.errors import Busy, HpoError
from hpo.ledger import Ledger, leases, queries
from hpo.ledger.process_id import Process
from hpo.ledger.store import PATIENCE
from hpo.storage.home import Home
from hpo.terminal import print
from hpo.text import command
from hpo.tracking.base import Unreachable
from hpo.tracking.mirror import GRACE, LEASE_TIMEOUT, MAX_PAUSE, POLL, DrainResult, Mirror, behind, drain, forget, lag
from hpo.tracking.mlflow_sqlite import open_mlflow
from hpo.tracking.trackers import TRACKERS, lease_of, open_tracker
from hpo.tracking.uri import tracker_name, tracking_uri_of
from trainer import redaction

__all__ = ["DrainResult", "Mirroring", "behind", "drain", "finish", "forget", "lag", "main", "send", "spawn"]

T = TypeVar("T")
SILENCE = 3 * GRACE  # seconds after which a mirror that does nothing is given up
BEHIND = 4  # exit code of a mirror that has left with something unsent, since the tracker did not take it
TELLING_DEATHS = 3  # of the mirror in one run: more than a kill or an outage explains


class Mirroring:
    """A process beside the driver, such as the mirror's, its output in `log`. It dies with this process."""

    def __init__(
        self, start: Callable[..., subprocess.Popen[bytes]], log: Path, what: str = "the mirror to MLflow"
    ) -> None:
        self._start, self._log, self._what = start, log, what
        self._started = time.monotonic()
        self._deaths = 0
        self.process = start()

    def kill(self) -> None:
        """End it at once; safe in a signal handler."""
        self.process.kill()

    def revive(self, *arguments: str, every: float = 0.0) -> str:
        """Start it again if it is dead, but no sooner than `every` seconds after its last start.

        What to tell the user, once: that it dies again and again.
        """
        code = self.process.poll()
        if code is None or time.monotonic() - self._started < every:
            return ""
        self._started = time.monotonic()
        self.process = self._start(*arguments)
        self._deaths += 1
        if self._deaths != TELLING_DEATHS:
            return ""
        return f"{self._what} has died {self._deaths} times, last with exit code {code}: see {self._log}."


def spawn(home: Home, storage: str, tracking_uri: str, study: str) -> Mirroring:
    """Start the mirror of a study; its output goes to a log of this run."""
    kind = tracking_uri.partition(":")[0]
    who = f"{kind}.mirror" if kind in TRACKERS else "mirror"
    log = home.logs / f"{begin_logs(home.logs, study, who)}.{who}.log"
    arguments = ["--study", study, "--home", str(home.root)]
    secret = {"HPO_STORAGE": storage, "HPO_TRACKING_URI": tracking_uri}
    return Mirroring(
        lambda *more: spawn_process("hpo.tracking.mirror_process", [*arguments, *more], log, **secret),
        log,
        f"the mirror to {kind}" if kind in TRACKERS else "the mirror to MLflow",
    )


def finish(
    mirroring: Mirroring,
    ledger: Ledger,
    tracking_uri: str,
    study: str,
    tell: Callable[[int], object] = lambda left: None,
) -> int:
    """Let the mirror send what is left and leave; how far the tracker is behind then, as `tell` is told meanwhile.

    It may take as long as it does anything. One that has not left by itself, whatever it ended by, is started once
    more, and a lease that none of them has freed is freed.
    """

    def left() -> int:
        return behind(ledger, tracker_name(tracking_uri), study)

    mirroring.process.terminate()
    await_end(mirroring.process, left, tell)
    if mirroring.process.returncode not in (0, BEHIND):
        mirroring.revive("--once")
        await_end(mirroring.process, left, tell)
    study_id = ledger.look(lambda connection: queries.study_row(connection, study)["id"])
    leases.free_of_the_dead(ledger, lease_of(study_id, tracking_uri))
    return left()


def await_end(process: subprocess.Popen[bytes], left: Callable[[], int], tell: Callable[[int], object]) -> None:
    """Wait for `process` to end; kill it once it has neither sent nor read, written or computed anything for long."""
    before, since = (left(), _activity(process.pid)), time.monotonic()
    while True:
        try:
            process.wait(1.0)
            return
        except subprocess.TimeoutExpired:
            now = left(), _activity(process.pid)
            if now[0] != before[0]:
                tell(now[0])
            if now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > SILENCE:
                process.kill()


def _activity(pid: int) -> tuple[str, ...]:
    """What changes while a process does something: its bytes read and written and its processor time, where /proc is.

    One on a slow host may take minutes for the files of one trial, before the ledger hears of it.
    """
    try:
        used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]  # man proc: utime, stime
        return *used, Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return ()


def send(ledger: Ledger, home: Home, study: str, tracking_uri: str | None) -> str:
    """Send MLflow what a command has changed; why it has not got it, empty where it has."""
    try:
        tracker = open_mlflow(tracking_uri_of(ledger, study, home, tracking_uri), home.artifacts)
        result = drain(ledger, tracker, study, home)
    except Busy:
        return "the study's mirror sends it to MLflow."
    except Unreachable as error:
        return f"MLflow has not got it ({error}): run `{command('sync')}`."
    tracker.close()
    return lag(result, tracker.name)


class Leave:
    """Told by SIGTERM, or by the death of the process that started this one; a second SIGTERM ends it at once."""

    def __init__(self, now: bool) -> None:
        self.now = now
        signal.signal(signal.SIGTERM, self._signalled)

    def _signalled(self, number: int, _: Any) -> None:
        if self.now:
            os._exit(128 + number)
        self.now = True

    def __call__(self) -> bool:
        return self.now or orphaned()

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until it is time to leave."""
        end, leaving = time.monotonic() + seconds, self()
        while (left := end - time.monotonic()) > 0 and self() == leaving:
            time.sleep(min(left, 0.1))

    def until(self, attempt: Callable[[], T], error: type[HpoError], grace: float = 0.0) -> T:
        """`attempt` until it does not raise `error`; raise it when it has been time to leave for `grace` seconds."""
        pause, end = POLL, math.inf
        while True:
            try:
                return attempt()
            except error as reason:
                end = min(end, time.monotonic() + grace) if self() else math.inf
                if time.monotonic() >= end:
                    raise
                print(reason, flush=True)
                pause = pause if end == math.inf else POLL
            self.wait(pause)
            pause = min(2 * pause, MAX_PAUSE)


def _run(options: argparse.Namespace, leave: Leave) -> int:
    home = Home.at(options.home)
    ledger = Ledger(options.storage or home.storage, create=False, patience=PATIENCE)
    uri = options.tracking_uri or home.tracking_uri
    clock = SystemClock()
    name = ledger.look(lambda connection: lease_of(queries.study_row(connection, options.study)["id"], uri))
    try:
        tracker = leave.until(lambda: open_tracker(uri, home.artifacts), Unreachable)
    except Unreachable as error:
        result = DrainResult(0, behind(ledger, tracker_name(uri), options.study), str(error))
    else:
        me, study = Process.current(), options.study
        lease = leave.until(lambda: leases.acquire(ledger, name, study, me, clock, LEASE_TIMEOUT), Busy)
        result = Mirror(ledger, tracker, options.study, home, lease, clock).follow(leave, GRACE, leave.wait)
        lease.release()
    if text := lag(result, tracker_name(uri)):
        print(text, flush=True)
    return BEHIND if result.behind else 0


def main(argv: Sequence[str] | None = None) -> int:
    """0 once all is sent, BEHIND if something is left, 1 to 3 as `hpo.errors` says."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m hpo.tracking.mirror_process")
    parser.add_argument("--study", required=True)
    parser.add_argument("--home")
    parser.add_argument("--storage", default=os.environ.get("HPO_STORAGE"))
    parser.add_argument("--tracking-uri", default=os.environ.get("HPO_TRACKING_URI"))
    parser.add_argument("--once", action="store_true", help="send what there is, then leave")
    options = parser.parse_args(argv)
    try:
        with Home.at(options.home).keeping():
            return _run(options, Leave(options.once))
    except HpoError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    redaction.install(streams=True)
    sys.exit(main())
