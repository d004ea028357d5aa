"""Keeps Optuna's storage in step with the ledger while its pages are open: every study of a home, in one thread.

What a study has trained before is sent at once, what it trains meanwhile within a second; what a kill cuts short, the
next one goes on with, as every mirror does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from hpo.clock import SystemClock
from hpo.declaration.references import load
from hpo.declaration.spec import StudySpec
from hpo.errors import Busy, DamagedLedger, HpoError
from hpo.ledger import Ledger, leases, queries
from hpo.ledger.process_id import Process
from hpo.storage.home import Home
from hpo.terminal import print
from hpo.tracking.mirror import LEASE_TIMEOUT, Mirror
from hpo.tracking.optuna_tracker import OptunaTracker, Searched
from hpo.tracking.trackers import lease_of

POLL = 0.5  # seconds between looks
FILE = "optuna.db"  # in the home


def storage_file(home: Home) -> Path:
    """Where Optuna's storage of a home lies."""
    return home.root / FILE


def searched(ledger: Ledger, name: str) -> Searched:
    """What a study declares; raises HpoError where its declaration cannot be read any more."""
    spec = StudySpec.from_json(ledger.look(lambda connection: queries.study_row(connection, name)["spec"]))
    metrics, directions = zip(*((one["metric"], one["direction"]) for one in spec.objectives), strict=True)
    return Searched(metrics, directions, load(spec.reference).space.dimensions)


def tracker_of(ledger: Ledger, file: Path) -> OptunaTracker:
    """Optuna's storage in `file`, for the studies of a ledger."""
    known: dict[str, Searched] = {}

    def declared(name: str) -> Searched:
        if name not in known:
            known[name] = searched(ledger, name)
        return known[name]

    return OptunaTracker(file, declared)


class Keeper:
    """A thread that mirrors the studies of `ledger`, those of `names` or all but derived ones, until `stop`.

    `failed` is called with what went wrong, if the thread cannot go on. A study that another process keeps, or whose
    declaration is gone, is left out and named on standard output.
    """

    def __init__(self, home: Home, storage: str, names: Sequence[str], failed: Callable[[BaseException], None]) -> None:
        self._home, self._storage, self._names, self._failed = home, storage, names, failed
        self._clock, self._leave = SystemClock(), threading.Event()
        self._mirrors: dict[str, tuple[Mirror, leases.Lease]] = {}
        self._told: dict[str, str] = {}
        self._thread = threading.Thread(target=self._guarded, name="keeper", daemon=True)

    def start(self) -> Keeper:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Send what is left, free the leases and end."""
        self._leave.set()
        self._thread.join()

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._failed(error)
            raise

    def _run(self) -> None:
        ledger = Ledger(self._storage, create=False)
        tracker = tracker_of(ledger, storage_file(self._home))
        try:
            while True:
                leaving = self._leave.is_set()
                for name in self._studies(ledger):
                    self._look(ledger, tracker, name, leaving)
                if leaving:
                    return
                self._leave.wait(POLL)
        finally:
            for _, lease in self._mirrors.values():
                lease.release()
            tracker.close()
            ledger.close()

    def _studies(self, ledger: Ledger) -> Sequence[str]:
        if self._names:
            return self._names
        derived = ledger.look(queries.derived)
        return [name for name in ledger.look(queries.study_names) if name not in derived]

    def _look(self, ledger: Ledger, tracker: OptunaTracker, name: str, leaving: bool) -> None:
        try:
            if name not in self._mirrors:
                self._mirrors[name] = self._begun(ledger, tracker, name)
            mirror, lease = self._mirrors[name]
            lease.renew()
            mirror.look(leaving=leaving)
            self._told.pop(name, None)
        except DamagedLedger:
            raise
        except HpoError as error:  # of this study alone, or for now: it is tried again
            if isinstance(error, Busy):
                self._mirrors.pop(name, None)
            if self._told.get(name) != str(error):
                self._told[name] = str(error)
                print(f"{name}: {error}", flush=True)

    def _begun(self, ledger: Ledger, tracker: OptunaTracker, name: str) -> tuple[Mirror, leases.Lease]:
        study_id = ledger.look(lambda connection: queries.study_row(connection, name)["id"])
        held = lease_of(study_id, tracker.name)
        lease = leases.acquire(ledger, held, name, Process.current(), self._clock, LEASE_TIMEOUT)
        return Mirror(ledger, tracker, name, self._home, lease, self._clock), lease
