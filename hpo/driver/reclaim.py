"""Reclaims trials from workers that are dead or silent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from hpo.clock import Clock
from hpo.declaration.command.program import ending
from hpo.ledger import Ledger, transactions
from hpo.ledger.process_id import is_dead
from hpo.ledger.views import driver as driver_queries


class Reclaimer:
    """Watches the running trials of one study.

    Silence is measured on this process's monotonic clock, and only while it watches. `codes` holds exit codes by host
    and pid for the processes whose end this process knows.
    """

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

    def reclaim(self, *, counted: bool = True, on_silence: Callable[[str, int], None] = lambda host, pid: None) -> None:
        """Reclaims trials from workers that are dead or have not renewed for `timeout` seconds.

        `on_silence` is called first for each worker that has not renewed.
        """
        rows = self._ledger.look(lambda connection: driver_queries.running(connection, self._study_id))
        now = self._clock.monotonic()
        if now - self._looked > self._timeout / 2:
            self._watched = {}  # this process was busy, or the ledger was unavailable and no worker could renew
        self._looked = now
        running = {}
        for row in rows:
            key, token = (row.id, row.fence), (row.renewals, row.revision)
            last_token, since = self._watched.get(key, (None, now))
            running[key] = (token, since if last_token == token else now)
            if is_dead(row.host, row.pid, row.pid_started):
                code = self._codes.get((row.host, row.pid))
                why = f"pid {row.pid} on {row.host} {'is gone' if code is None else ending(code)}"
            elif now - running[key][1] >= self._timeout:
                on_silence(row.host, row.pid)
                why = f"pid {row.pid} on {row.host} was silent for {self._timeout:g} s"
            else:
                continue
            self._ledger.transact(lambda c, key=key, why=why: transactions.lose(c, *key, why, counted=counted))
        self._watched = running
