"""Tells cheaply whether the ledger has been written, so that who waits for something need not ask for it again and
again."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable

from hpo.ledger.store import Ledger

LOOK = 0.02  # seconds between looks at a counter, each of which takes microseconds
BEAT = 0.1  # seconds after which a database without such a counter counts as written


class Changes:
    """True when called for the first time, and then wherever anything may have been committed since the last call.

    On SQLite a connection's `data_version` tells that another one has committed, in this process or elsewhere (SQLite's
    documentation, "PRAGMA data_version"); PostgreSQL has no such counter, and is taken to be written at every BEAT. One
    thread asks; a caller sleeps for `pause` seconds between two calls.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._connection = ledger.engine.raw_connection() if ledger.is_sqlite else None
        self._cursor = self._connection.cursor() if self._connection else None
        self._seen: object = None
        self.pause = LOOK if ledger.is_sqlite else BEAT

    def __call__(self) -> bool:
        version = self._version()
        changed, self._seen = version != self._seen, version
        return changed

    def wait(self, longest: float, sleep: Callable[[float], bool | None] = time.sleep) -> bool:
        """Sleep until that is so, for `longest` seconds at most and no longer than until `sleep` gives True."""
        end = time.monotonic() + longest
        while not self():
            if time.monotonic() >= end or sleep(self.pause):
                return False
        return True

    def close(self) -> None:
        """Give the connection back. Whatever is asked afterwards counts as written."""
        if self._connection is not None and self._cursor is not None:
            self._cursor.close()
            self._connection.close()

    def _version(self) -> object:
        if self._cursor is None:
            return time.monotonic() // BEAT
        try:
            return self._cursor.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:
            return object()  # unlike any before: who reads the ledger now is told what is wrong with it
