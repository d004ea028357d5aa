"""Sends a study's alerts while it runs, in a process of its own.

    python -m hpo.alerts.process --study NAME --home DIR [--storage URL]

Training never waits for it. Alerts that a target has not accepted when the process must leave stay in the ledger for
the next run.

On the first SIGTERM it sends the remaining alerts, then leaves; on the second it leaves at once. If it is killed
together with its driver it reports nothing. If its driver alone is killed it reports that and leaves within `GRACE`
seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from hpo.alerts import rules
from hpo.alerts.dispatch import Dispatcher
from hpo.clock import SystemClock
from hpo.errors import Busy, DamagedLedger, HpoError, StorageError
from hpo.ledger import Ledger, leases, queries
from hpo.ledger.database.store import PATIENCE
from hpo.ledger.process_id import Process
from hpo.ledger.views import alerts as alert_queries
from hpo.storage.home import Home
from hpo.supervised import Leave, SupervisedProcess
from hpo.terminal import print
from hpo.text import from_anywhere, given
from hpo.tracking.mirror import LEASE_TIMEOUT
from trainer import redaction

POLL = 1.0  # seconds between looks at the ledger
GRACE = 10.0  # seconds of further tries once the process must leave
LOOK = 5.0  # seconds between the driver's looks at alerts that were not accepted


class Alerting:
    """Holds the alert process of a study for its driver, and the notices about it for the user."""

    def __init__(self, process: SupervisedProcess, ledger: Ledger, study_id: int) -> None:
        self._process, self._ledger, self._id = process, ledger, study_id
        self._reported, self._looked = set[str](), time.monotonic()
        self.kill = process.kill

    @classmethod
    def of(cls, home: Home, ledger: Ledger, study: str, alerts: Sequence[str]) -> Alerting | None:
        """Starts the process; returns None for a study without alerts."""
        study_id = ledger.look(lambda connection: queries.study_row(connection, study).id)
        targets = [rule.target for rule in rules.parse_all(alerts)]
        ledger.transact(lambda connection: alert_queries.begin(connection, study_id, targets))
        if not targets:
            return None
        title, home_words = "the process that sends alerts", ["--home", str(home.root)]
        process = SupervisedProcess.of(
            "hpo.alerts.process", home.logs, study, "alerts", title, home_words, HPO_STORAGE=ledger.url
        )
        return cls(process, ledger, study_id)

    def notices(self, every: float) -> list[str]:
        """Returns new notices for the user, each once: a target that accepts nothing, a process that keeps dying."""
        notices = [self._process.revive(every=every)]
        if time.monotonic() - self._looked >= LOOK:
            self._looked = time.monotonic()
            with suppress(StorageError):  # the driver itself reports an unreachable ledger
                notices += self._untaken()
        return notices

    def finish(self) -> list[str]:
        """Lets the process send the rest and leave, restarted once if it was killed; returns notices of refusals."""
        self._process.finish(self._waiting)
        leases.free_of_the_dead(self._ledger, f"alerts:{self._id}")
        return self._untaken()

    def _waiting(self) -> int:
        return len(self._ledger.look(lambda connection: alert_queries.waiting(connection, self._id)))

    def _untaken(self) -> list[str]:
        troubles = self._ledger.look(lambda connection: alert_queries.troubles(connection, self._id))
        new = {target: trouble for target, trouble in troubles.items() if target not in self._reported}
        self._reported |= new.keys()
        return [trouble.describe(target) for target, trouble in new.items()]


def _run(options: argparse.Namespace, leave: Leave) -> int:
    home, clock = Home.at(options.home), SystemClock()
    ledger = Ledger(options.storage or home.storage, create=False, patience=PATIENCE)
    study = ledger.look(lambda connection: queries.study_row(connection, options.study))
    declared = rules.parse_all(study.environment.get("alerts", []))
    name, process = f"alerts:{study.id}", Process.current()
    # A process whose driver was killed holds the lease until it has reported that.
    lease = leave.until(lambda: leases.acquire(ledger, name, options.study, process, clock, LEASE_TIMEOUT), Busy, GRACE)
    try:
        _follow(Dispatcher(ledger, options.study, home, declared, lease, clock), leave)
    finally:
        lease.release()
    return 0


def _follow(dispatcher: Dispatcher, leave: Leave) -> None:
    """Looks and sends repeatedly; when leaving, until all alerts are accepted or `GRACE` seconds are over."""
    deadline, printed = float("inf"), ""
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
            printed = ""
        except DamagedLedger:
            raise
        except StorageError as error:
            if str(error) != printed:
                print(error, flush=True)
            printed = str(error)
        if time.monotonic() >= deadline:
            return
        leave.wait(POLL)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the process. Returns 0 after it has left, or 1 to 3 as listed in `hpo.errors`."""
    parser = argparse.ArgumentParser(prog="python -m hpo.alerts.process")
    parser.add_argument("--study", required=True)
    parser.add_argument("--home")
    parser.add_argument("--storage", default=os.environ.get("HPO_STORAGE"))
    parser.add_argument("--once", action="store_true", help="send what there is, then leave")
    options = parser.parse_args(argv)
    try:
        home = Home.at(options.home)
        if options.storage not in (None, home.storage):
            given("storage", options.storage)
        with home.keeping(), from_anywhere(str(home.root)):  # the reader of an alert may be elsewhere
            return _run(options, Leave(options.once))
    except HpoError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    redaction.install(streams=True)
    sys.exit(main())
