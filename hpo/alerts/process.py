"""The process that sends a study's alerts while it runs.

    python -m hpo.alerts.process --study NAME --home DIR [--storage URL]

Training never waits for it. What a target has not taken when it must leave stays in the ledger for the next run.

SIGTERM: send what is left, then leave. A second one: leave at once. Killed together with its driver it says nothing;
where its driver alone is killed it says so, and leaves within `GRACE` seconds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from hpo.alerts import rules
from hpo.alerts.dispatch import Dispatcher
from hpo.child_process import begin_logs
from hpo.child_process import spawn as spawn_process
from hpo.clock import SystemClock
from hpo.errors import Busy, DamagedLedger, HpoError, StorageError
from hpo.ledger import Ledger, alert_queries, leases, queries
from hpo.ledger.process_id import Process
from hpo.ledger.store import PATIENCE
from hpo.storage.home import Home
from hpo.terminal import print
from hpo.text import from_anywhere, given
from hpo.tracking.mirror import LEASE_TIMEOUT
from hpo.tracking.mirror_process import Leave, Mirroring, await_end
from trainer import redaction

POLL = 1.0  # seconds between looks
GRACE = 10.0  # seconds of trying once it is time to leave
LOOK = 5.0  # seconds between looks of the driver at what was not taken


class Alerting:
    """The alerts of a study as its driver holds them: a process, and what the user is to be told of it."""

    def __init__(self, process: Mirroring, ledger: Ledger, study_id: int) -> None:
        self._process, self._ledger, self._id = process, ledger, study_id
        self._told, self._looked = set[str](), time.monotonic()
        self.kill = process.kill

    @classmethod
    def of(cls, home: Home, ledger: Ledger, study: str, alerts: Sequence[str]) -> Alerting | None:
        """Start the process; None for a study without alerts."""
        study_id = ledger.look(lambda connection: queries.study_row(connection, study)["id"])
        targets = [rule.target for rule in rules.parse_all(alerts)]
        ledger.transact(lambda connection: alert_queries.begin(connection, study_id, targets))
        if not targets:
            return None
        log = home.logs / f"{begin_logs(home.logs, study, 'alerts')}.alerts.log"
        arguments = ["--study", study, "--home", str(home.root)]

        def start(*more: str) -> subprocess.Popen[bytes]:
            return spawn_process("hpo.alerts.process", [*arguments, *more], log, HPO_STORAGE=ledger.url)

        return cls(Mirroring(start, log, "the process that sends alerts"), ledger, study_id)

    def notices(self, every: float) -> list[str]:
        """What to tell the user now, each thing once: a target that takes nothing, a process that keeps dying."""
        found = [self._process.revive(every=every)]
        if time.monotonic() - self._looked >= LOOK:
            self._looked = time.monotonic()
            with suppress(StorageError):  # of a ledger that is away the driver itself speaks
                found += self._untaken()
        return found

    def finish(self) -> list[str]:
        """Let the process send what is left and leave, started once more if it was killed; what was not taken."""
        self._process.process.terminate()
        await_end(self._process.process, self._waiting, lambda _: None)
        if self._process.process.returncode:
            self._process.revive("--once")
            await_end(self._process.process, self._waiting, lambda _: None)
        leases.free_of_the_dead(self._ledger, f"alerts:{self._id}")
        return self._untaken()

    def _waiting(self) -> int:
        return len(self._ledger.look(lambda connection: alert_queries.waiting(connection, self._id)))

    def _untaken(self) -> list[str]:
        troubles = self._ledger.look(lambda connection: alert_queries.troubles(connection, self._id))
        new = {target: trouble for target, trouble in troubles.items() if target not in self._told}
        self._told |= new.keys()
        return [trouble.describe(target) for target, trouble in new.items()]


def _run(options: argparse.Namespace, leave: Leave) -> int:
    home, clock = Home.at(options.home), SystemClock()
    ledger = Ledger(options.storage or home.storage, create=False, patience=PATIENCE)
    study = ledger.look(lambda connection: queries.study_row(connection, options.study))
    declared = rules.parse_all(study["environment"].get("alerts", []))
    name, me = f"alerts:{study['id']}", Process.current()
    # One whose driver was killed has the lease until it has said so.
    lease = leave.until(lambda: leases.acquire(ledger, name, options.study, me, clock, LEASE_TIMEOUT), Busy, GRACE)
    try:
        _follow(Dispatcher(ledger, options.study, home, declared, lease, clock), leave)
    finally:
        lease.release()
    return 0


def _follow(dispatcher: Dispatcher, leave: Leave) -> None:
    """Look and send again and again; once leaving, until all is taken or `GRACE` seconds are over."""
    deadline, told = float("inf"), ""
    while True:
        last = leave()
        if last and deadline == float("inf"):
            deadline = time.monotonic() + GRACE
            dispatcher.hurry()
        try:
            dispatcher.look(leaving=last)
            if not dispatcher.deliver(leaving=last) and last:
                return
            if last and dispatcher.succeeded:
                return
            told = ""
        except DamagedLedger:
            raise
        except StorageError as error:
            if str(error) != told:
                print(error, flush=True)
            told = str(error)
        if time.monotonic() >= deadline:
            return
        leave.wait(POLL)


def main(argv: Sequence[str] | None = None) -> int:
    """0 once it has left, 1 to 3 as `hpo.errors` says."""
    parser = argparse.ArgumentParser(prog="python -m hpo.alerts.process")
    parser.add_argument("--study", required=True)
    parser.add_argument("--home")
    parser.add_argument("--storage", default=os.environ.get("HPO_STORAGE"))
    parser.add_argument("--once", action="store_true", help="send what there is, then leave")
    options = parser.parse_args(argv)
    try:
        home = Home.at(options.home)
        if options.storage not in (None, home.storage):
            given("--storage", options.storage)
        with home.keeping(), from_anywhere(str(home.root)):  # who reads an alert is elsewhere
            return _run(options, Leave(options.once))
    except HpoError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    redaction.install(streams=True)
    sys.exit(main())
