"""Leases names, without wall clocks: one driver and one mirror per study.

A lease is held while its owner renews its counter. Another process takes it over at once if the owner ran on the same
host and is dead, and otherwise if the counter has not changed for `timeout` seconds of the observer's own monotonic
clock. Taking over raises the fence, so the old owner's later writes are refused.
"""

from __future__ import annotations

import datetime
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import select, update
from sqlalchemy.engine import Connection

from hpo.clock import Clock
from hpo.errors import Busy, HpoError, StorageError
from hpo.ledger.database.schema import SCHEMA_VERSION
from hpo.ledger.database.statements import CHECK_LEASE, insert_new
from hpo.ledger.database.store import Ledger
from hpo.ledger.database.tables import leases
from hpo.ledger.process_id import Process, is_dead
from hpo.ledger.read import every, first
from hpo.ledger.rows import LeaseRow
from hpo.terminal import print
from trainer.errors import TrainerError

T = TypeVar("T")


@dataclass(frozen=True)
class Lease:
    """A lease that was acquired; `fence` proves it."""

    ledger: Ledger
    name: str
    owner: str
    fence: int

    def check(self, connection: Connection) -> None:
        """Renews the lease inside a transaction of its owner.

        Raises Busy, which rolls it back, if the lease is lost.
        """
        this_lease = {"lease": self.name, "holder": self.owner, "held": self.fence}
        if connection.execute(CHECK_LEASE, this_lease).rowcount != 1:
            raise Busy(f"{self.name} has been taken over by another process; this one stops.")

    def write(self, body: Callable[[Connection], T]) -> T:
        """Runs `body` in a transaction of the owner and returns its result.

        Raises Busy and commits nothing if the lease is lost.
        """

        def checked(connection: Connection) -> T:
            self.check(connection)
            return body(connection)

        return self.ledger.transact(checked)

    def renew(self) -> None:
        """Renews the lease; raises Busy if it is lost."""
        self.ledger.transact(self.check)

    def release(self) -> None:
        """Frees the lease; harmless if it is lost already."""
        this_lease = (leases.c.name == self.name) & (leases.c.owner == self.owner) & (leases.c.fence == self.fence)
        self.ledger.transact(lambda connection: connection.execute(update(leases).where(this_lease).values(owner=None)))


class Heartbeat:
    """Calls `beat`, which renews a lease, every `period` seconds from its own thread, until it is closed.

    An unreachable ledger is retried; the code under the lease meets the same outage and decides. Any other error of
    `beat` ends the thread, and `check` raises it.
    """

    def __init__(self, name: str, beat: Callable[[], None], period: float) -> None:
        self._name, self._beat, self._period = name, beat, period
        self._closing = threading.Event()
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"{name} lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises the error that ended the thread: Busy or Fenced if the lease is lost, HpoError for a bug."""
        if isinstance(self._ended, HpoError | TrainerError):
            raise self._ended
        if self._ended is not None:
            reason = f"{type(self._ended).__name__}: {self._ended}"
            raise HpoError(f"the lease of {self._name} is not renewed any more ({reason}).") from self._ended

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.wait(self._period):
            try:
                self._beat()
            except StorageError as error:
                print(f"the lease of {self._name} could not be renewed: {error}", file=sys.stderr)
            except BaseException as error:
                self._ended = error
                return


def holder(connection: Connection, name: str) -> LeaseRow | None:
    """Returns the row of a lease that a process holds, dead or alive; None if it is free."""
    row = first(LeaseRow, connection.execute(select(leases).where(leases.c.name == name)))
    return None if row is None or row.owner is None else row


def free_of_the_dead(ledger: Ledger, name: str) -> None:
    """Frees a lease whose holder is known to be dead; any other lease stays until another process takes it over."""

    def body(connection: Connection) -> None:
        row = holder(connection, name)
        if row is not None and is_dead(row.host, row.pid, row.pid_started):
            this_lease = (leases.c.name == name) & (leases.c.owner == row.owner) & (leases.c.fence == row.fence)
            connection.execute(update(leases).where(this_lease).values(owner=None))

    ledger.transact(body)


def has_dead_holder(connection: Connection, names: Iterable[str]) -> bool:
    """Returns True if a process of this host has died holding one of the leases."""
    rows = (holder(connection, name) for name in names)
    return any(row is not None and is_dead(row.host, row.pid, row.pid_started) for row in rows)


def holders(connection: Connection) -> dict[str, LeaseRow]:
    """Returns name -> row of every lease that a process holds, dead or alive."""
    rows = every(LeaseRow, connection.execute(select(leases)))
    return {row.name: row for row in rows if row.owner is not None}


def acquire(ledger: Ledger, name: str, study: str, process: Process, clock: Clock, timeout: float) -> Lease:
    """Takes a study's lease, waiting up to `timeout` seconds for a silent owner on another host.

    Raises Busy if it is alive.
    """
    deadline = clock.monotonic() + timeout
    seen: tuple[int, int] | None = None
    while True:
        last_look = clock.monotonic() >= deadline
        taken = ledger.transact(lambda c, seen=seen, last=last_look: _try(c, name, process, clock, seen, last))
        if isinstance(taken, int):
            return Lease(ledger, name, process.id, taken)
        seen = seen or (taken.fence, taken.renewals)
        alive_here = taken.host == process.host
        if alive_here or (taken.fence, taken.renewals) != seen:
            raise Busy(_busy(name, study, taken))
        clock.sleep(min(1.0, timeout / 10))


def _try(
    connection: Connection, name: str, process: Process, clock: Clock, seen: tuple[int, int] | None, last_look: bool
) -> int | LeaseRow:
    """Returns the new fence if the lease was free, dead or silent; else its row."""
    locked = select(leases).where(leases.c.name == name).with_for_update()
    row = first(LeaseRow, connection.execute(locked))
    holder_columns = {
        "owner": process.id,
        "host": process.host,
        "pid": process.pid,
        "pid_started": process.started,
        "since": clock.wall(),
        "schema": SCHEMA_VERSION,
    }
    if row is None:
        new = {"name": name, "fence": 1, **holder_columns}
        if connection.execute(insert_new(connection, leases), new).rowcount == 1:
            return 1
        row = first(LeaseRow, connection.execute(locked))
        assert row is not None, "nobody deletes a lease"
    if row.owner == process.id:
        return row.fence  # a retried commit that had succeeded
    silent = last_look and seen == (row.fence, row.renewals)
    if row.owner is not None and not silent and not is_dead(row.host, row.pid, row.pid_started):
        return row
    fence = row.fence + 1
    connection.execute(update(leases).where(leases.c.name == name).values(fence=fence, **holder_columns))
    return fence


def _busy(name: str, study: str, row: LeaseRow) -> str:
    role, _, _ = name.partition(":")
    since = datetime.datetime.fromtimestamp(row.since).astimezone().isoformat(timespec="seconds")
    owner = f"host {row.host}, pid {row.pid}, since {since}"
    return f"study {study!r} already has a {role}: {owner}; wait for it or stop it."
