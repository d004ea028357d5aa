"""Keeps the checkpoints of a study within a number of bytes while it is driven."""

from __future__ import annotations

from hpo.driver.request import DriverOptions
from hpo.ledger import Ledger
from hpo.ledger.leases import Lease


class Retention:
    """Drops checkpoints under the driver's lease.

    It acts only after a trial has ended; the first time it finishes a removal that a killed driver left undone.
    """

    def __init__(self, ledger: Ledger, study: str, options: DriverOptions, lease: Lease) -> None:
        self._ledger, self._study, self._home, self._lease = ledger, study, options.home, lease
        self._max_bytes = options.max_bytes
        self._due = self._first = True
        self._sizes: dict[int, int] = {}

    def note_end(self) -> None:
        """Notes that a trial has ended."""
        self._due = True

    def keep(self) -> None:
        """Drops checkpoints beyond the limit, if a trial has ended since the last call."""
        if self._max_bytes is not None and self._due:
            from hpo.storage.gc import keep_within  # imports torch, which a driver needs for nothing else

            self._due, first, self._first = False, self._first, False
            whose = self._ledger, self._home, self._study, self._lease
            keep_within(*whose, self._max_bytes, self._sizes, finish=first)
