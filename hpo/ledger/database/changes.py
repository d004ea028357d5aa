"""Detects cheaply whether the ledger has been written, so that waiting code need not query it repeatedly.

SQLite has a counter, which each waiting process reads. On PostgreSQL a transaction that lets someone act notifies: a
trial waits, ends or thaws, or a study ends. A report notifies nobody, because PostgreSQL takes a lock for notifications
at commit. Each process listens over one connection, whatever the number of its threads and ledgers. A notification that
is lost costs at most POLL seconds.
"""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

from sqlalchemy import exc
from sqlalchemy.engine import Connection

from hpo.ledger.database.store import Ledger

LOOK = 0.02  # seconds between looks at a counter, each of which takes microseconds
BEAT = 0.1  # seconds after which a database that nobody listens to counts as written
POLL = 5.0  # seconds after which a database that notifies counts as written
_CHANNEL = "hpo"
_AGAIN = 1.0  # seconds before a new try to listen, and at most until a listener leaves


def announce(connection: Connection) -> None:
    """Wakes everybody who waits for the ledger once this transaction commits; SQLite needs nothing for it."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"NOTIFY {_CHANNEL}")


class Changes:
    """Returns True on its first call, and then whenever anything may have been committed since the last call.

    On SQLite a connection's `data_version` shows that another one has committed, in this process or elsewhere (SQLite's
    documentation, "PRAGMA data_version"). On PostgreSQL it returns True after a notification, every `poll` seconds, and
    at every BEAT while this process cannot listen. One thread calls it and sleeps `pause` seconds between calls.
    """

    pause = LOOK

    def __init__(self, ledger: Ledger, poll: float = POLL) -> None:
        self._connection = ledger.engine.raw_connection() if ledger.is_sqlite else None
        self._cursor = self._connection.cursor() if self._connection else None
        self._listener = None if ledger.is_sqlite else _Listener.of(ledger)
        self._poll, self._due = poll, math.inf
        self._seen: object = None

    def __call__(self) -> bool:
        version, now = self._version(), time.monotonic()
        if version == self._seen and now < self._due:
            return False
        self._seen = version
        if self._listener is not None:
            self._due = now + (self._poll if self._listener.listens else BEAT)
        return True

    def wait(self, longest: float, sleep: Callable[[float], bool | None] = time.sleep) -> bool:
        """Sleeps until something may have been committed, at most `longest` seconds or until `sleep` returns True."""
        end = time.monotonic() + longest
        while not self():
            if time.monotonic() >= end or sleep(self.pause):
                return False
        return True

    def close(self) -> None:
        """Returns the connection to the pool. Later calls report the ledger as written."""
        if self._connection is not None and self._cursor is not None:
            self._cursor.close()
            self._connection.close()
        if self._listener is not None:
            self._listener.leave()
            self._listener, self._due = None, -math.inf

    def _version(self) -> object:
        if self._cursor is None:
            return self._listener and (self._listener.count, self._listener.listens)
        try:
            return self._cursor.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:
            return object()  # unlike any value before: the caller reads the ledger next and gets the error


class _Listener:
    """Counts the notifications of a PostgreSQL ledger in a thread of its own, while anyone in this process waits.

    A process that was forked has none yet: threads stay with the process that started them.
    """

    _guard = threading.Lock()
    _of: ClassVar[dict[tuple[int, str], _Listener]] = {}

    def __init__(self, ledger: Ledger) -> None:
        self.count, self.listens = 0, False
        self._key, self._users, self._engine = (os.getpid(), ledger.url), 0, ledger.engine
        self._left = threading.Event()
        threading.Thread(target=self._run, name="listener", daemon=True).start()

    @classmethod
    def of(cls, ledger: Ledger) -> _Listener:
        """Returns this process's listener, which runs until each caller has left it."""
        key = os.getpid(), ledger.url
        with cls._guard:
            listener = cls._of[key] = cls._of.get(key) or cls(ledger)
            listener._users += 1
            return listener

    def leave(self) -> None:
        with self._guard:
            self._users -= 1
            if self._users == 0:
                self._of.pop(self._key, None)
                self._left.set()

    def _run(self) -> None:
        from psycopg import Error

        while not self._left.is_set():
            with suppress(Error, exc.SQLAlchemyError):  # callers poll at every BEAT until this works again
                self._listen()
            self.listens = False
            self._left.wait(_AGAIN)

    def _listen(self) -> None:
        """Counts notifications until everybody has left, or an error says that the connection is gone."""
        pooled = self._engine.raw_connection()
        connection: Any = pooled.driver_connection
        pooled.detach()  # the pool keeps its size
        try:
            connection.rollback()
            connection.autocommit = True
            connection.execute(f"LISTEN {_CHANNEL}")
            self.listens = True
            while not self._left.is_set():
                for _ in connection.notifies(timeout=_AGAIN):
                    self.count += 1
        finally:
            connection.close()
