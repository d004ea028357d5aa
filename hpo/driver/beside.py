"""Holds the processes beside a driver: the mirror of each tracker, and the process that sends alerts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from hpo.alerts.process import Alerting
from hpo.driver.request import DriverOptions
from hpo.ledger import Ledger, leases, queries
from hpo.supervised import SupervisedProcess
from hpo.terminal import print
from hpo.tracking import mirror_process
from hpo.tracking.trackers import lease_of
from hpo.tracking.uri import tracker_name

REVIVAL = 5.0  # seconds between starts of a process that keeps dying


class Beside:
    """Starts, revives and ends the processes beside a driver.

    They neither slow the driver nor make it fail; each of their problems is printed once, on standard error.
    """

    def __init__(self, options: DriverOptions, ledger: Ledger, study: str, *, mirrors: bool = True) -> None:
        self._options, self._ledger, self._study = options, ledger, study
        self._uris = [options.tracking_uri, *options.trackers] if mirrors else []
        self._mirrors: list[SupervisedProcess] = []
        self._alerting: Alerting | None = None

    def behind(self) -> int:
        """Returns how many of the ledger's transactions the trackers have not received."""
        names = map(tracker_name, self._uris)
        return sum(mirror_process.behind(self._ledger, name, self._study) for name in names)

    def is_held_by_the_dead(self) -> bool:
        """Returns True if a mirror has died with its lease, which only the next one frees."""
        names = self._ledger.look(
            lambda connection: [lease_of(queries.study_row(connection, self._study).id, uri) for uri in self._uris]
        )
        return self._ledger.look(lambda connection: leases.has_dead_holder(connection, names))

    def start(self) -> None:
        """Starts the processes; each continues where an earlier one was killed."""
        options, ledger = self._options, self._ledger
        self._mirrors = [mirror_process.spawn(options.home, options.storage, uri, self._study) for uri in self._uris]
        self._alerting = Alerting.of(options.home, ledger, self._study, options.alerts)

    def kill(self) -> None:
        """Ends the processes at once; safe in a signal handler."""
        for mirror in self._mirrors:
            mirror.kill()
        if self._alerting is not None:
            self._alerting.kill()

    def tick(self) -> None:
        """Restarts processes that have died, and prints their notices."""
        notices = [mirror.revive(every=REVIVAL) for mirror in self._mirrors]
        _tell(notices + (self._alerting.notices(REVIVAL) if self._alerting else []))

    def finish(self, tell: Callable[[int], object]) -> int:
        """Waits for the processes to finish their work and end.

        Returns how many transactions MLflow still lacks; `tell` is called with that number in the meantime.
        """
        left = [
            mirror_process.finish(mirror, self._ledger, uri, self._study, tell)
            for mirror, uri in zip(self._mirrors, self._uris, strict=True)
        ]
        for uri, behind in zip(self._uris[1:], left[1:], strict=True):
            _tell([mirror_process.lag(mirror_process.DrainResult(0, behind), tracker_name(uri))])
        self._finish_alerts()
        return left[0] if left else 0

    def _finish_alerts(self) -> None:
        _tell(self._alerting.finish() if self._alerting else [])
        self._alerting = None

    def hand_over(self) -> None:
        """Sends the alerts of the search; its mirrors continue."""
        self._finish_alerts()

    def finish_later(self, ledger: Ledger) -> int:
        """Finishes mirrors that were handed over, as `finish` does, with another connection to the ledger."""
        self._ledger = ledger
        return self.finish(lambda left: None)


@dataclass
class HandedOver:
    """Holds the processes beside a search until its end phase is over.

    Its mirrors send the trials of the phase too, so that no others have to start.
    """

    beside: Beside | None = None

    def finish(self, ledger: Ledger) -> int:
        """Returns how many transactions MLflow lacks once the mirrors have left."""
        left = self.beside.finish_later(ledger) if self.beside is not None else 0
        self.beside = None
        return left

    def close(self) -> None:
        """Ends the mirrors at once if they have not left."""
        if self.beside is not None:
            self.beside.kill()


def _tell(notices: list[str]) -> None:
    for notice in filter(None, notices):
        print(notice, file=sys.stderr)
