"""Takes trials back from workers that are dead or silent."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hpo.clock import Clock
from hpo.declaration.command.program import ending
from hpo.ledger import Ledger, driver_queries, transactions
from hpo.ledger.process_id import is_dead


class Reclaimer:
    """Watches the running trials of one study; time is the observer's own monotonic clock's, as far as it looked.
    `codes` has how processes have ended, by host and pid, as far as this process knows."""

    def __init__(
        self,
        ledger: Ledger,
        study_id: int,
        clock: Clock,
        timeout: float,
        codes: Mapping[tuple[str, int], int] = MappingProxyType({}),
    ) -> None:
        self._ledger, self._study_id, self._clock, self._timeout = ledger, study_id, clock, timeout
        self._codes = codes
        self._watched: dict[tuple[int, int], tuple[tuple[int, int], float]] = {}
        self._looked = clock.monotonic()

    def reclaim(self, *, counted: bool = True) -> None:
        """Take trials back from workers that are dead, or have not renewed for `timeout` seconds."""
        rows = self._ledger.look(lambda connection: driver_queries.running(connection, self._study_id))
        now = self._clock.monotonic()
        if now - self._looked > self._timeout / 2:
            self._watched = {}  # nobody was looking, or nobody could renew: this process was busy, or the ledger away
        self._looked = now
        running = {}
        for row in rows:
            key, token = (row["id"], row["fence"]), (row["renewals"], row["revision"])
            seen, since = self._watched.get(key, (None, now))
            running[key] = (token, since if seen == token else now)
            if is_dead(row["host"], row["pid"], row["pid_started"]):
                code = self._codes.get((row["host"], row["pid"]))
                why = f"pid {row['pid']} on {row['host']} {'is gone' if code is None else ending(code)}"
            elif now - running[key][1] >= self._timeout:
                why = f"pid {row['pid']} on {row['host']} was silent for {self._timeout:g} s"
            else:
                continue
            self._ledger.transact(lambda c, key=key, why=why: transactions.lose(c, *key, why, counted=counted))
        self._watched = running
