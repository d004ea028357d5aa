"""The processes beside a driver: the mirror of each tracker, and the one that sends alerts."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hpo.alerts.process import Alerting
from hpo.driver.request import DriverOptions
from hpo.ledger import Ledger
from hpo.terminal import print
from hpo.tracking import mirror_process
from hpo.tracking.uri import tracker_name

REVIVAL = 5.0  # seconds between starts of a process that keeps dying


class Beside:
    """None of them slows a driver or fails it: what they cannot do is said once, on standard error."""

    def __init__(self, options: DriverOptions, ledger: Ledger, study: str) -> None:
        self._options, self._ledger, self._study = options, ledger, study
        self._uris = [options.tracking_uri, *options.trackers]
        self._mirrors: list[mirror_process.Mirroring] = []
        self._alerting: Alerting | None = None

    def behind(self) -> int:
        """How many of the ledger's transactions the trackers have not got."""
        names = map(tracker_name, self._uris)
        return sum(mirror_process.behind(self._ledger, name, self._study) for name in names)

    def start(self) -> None:
        """Start them; those that were killed before go on where they were."""
        options, ledger = self._options, self._ledger
        self._mirrors = [mirror_process.spawn(options.home, options.storage, uri, self._study) for uri in self._uris]
        self._alerting = Alerting.of(options.home, ledger, self._study, options.alerts)

    def kill(self) -> None:
        """End them at once; safe in a signal handler."""
        for one in self._mirrors:
            one.kill()
        if self._alerting is not None:
            self._alerting.kill()

    def tick(self) -> None:
        """Start again what has died, and tell the user what there is to tell."""
        notices = [mirror.revive(every=REVIVAL) for mirror in self._mirrors]
        _tell(notices + (self._alerting.notices(REVIVAL) if self._alerting else []))

    def finish(self, tell: Callable[[int], object]) -> int:
        """Let them do what is left and leave; how far MLflow is behind then, as `tell` is told meanwhile."""
        left = [
            mirror_process.finish(mirror, self._ledger, uri, self._study, tell)
            for mirror, uri in zip(self._mirrors, self._uris, strict=True)
        ]
        for uri, behind in zip(self._options.trackers, left[1:], strict=True):
            _tell([mirror_process.lag(mirror_process.DrainResult(0, behind), tracker_name(uri))])
        _tell(self._alerting.finish() if self._alerting else [])
        return left[0]


def _tell(notices: list[str]) -> None:
    for notice in filter(None, notices):
        print(notice, file=sys.stderr)
