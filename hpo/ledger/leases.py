"""Leases on names, without wall clocks: one driver and one mirror per study.

A lease is held while its owner renews its counter. Another process takes it over at once when the owner ran on the
same host and is dead, and otherwise when the counter has stood still for `timeout` seconds of the observer's own
monotonic clock. Taking over raises the fence, so whatever the old owner still tries is refused.
"""

from __future__ import annotations

import datetime
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import select, update
from sqlalchemy.engine import Connection, RowMapping

from hpo.clock import Clock
from hpo.errors import Busy, HpoError, StorageError
from hpo.ledger.process_id import Process, is_dead
from hpo.ledger.statements import CHECK_LEASE, insert_new
from hpo.ledger.store import Ledger
from hpo.ledger.tables import leases
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
        """Renew inside a transaction of the owner's; raise Busy, and so roll it back, if the lease is lost."""
        mine = {"lease": self.name, "holder": self.owner, "held": self.fence}
        if connection.execute(CHECK_LEASE, mine).rowcount != 1:
            raise Busy(f"{self.name} has been taken over by another process; this one stops.")

    def write(self, body: Callable[[Connection], T]) -> T:
        """What a transaction of the owner's gives; raise Busy, and let nothing of it be, if the lease is lost."""

        def checked(connection: Connection) -> T:
            self.check(connection)
            return body(connection)

        return self.ledger.transact(checked)

    def renew(self) -> None:
        """Raise Busy if the lease is lost."""
        self.ledger.transact(self.check)

    def release(self) -> None:
        """Free the lease; harmless if it is lost already."""
        mine = (leases.c.name == self.name) & (leases.c.owner == self.owner) & (leases.c.fence == self.fence)
        self.ledger.transact(lambda connection: connection.execute(update(leases).where(mine).values(owner=None)))


class Heartbeat:
    """Calls `beat`, which renews a lease, every `period` seconds from a thread of its own, until it is closed.

    A ledger that is away is tried again: whoever works under the lease meets the same outage and decides there.
    Whatever else `beat` raises ends the thread, and `check` raises it.
    """

    def __init__(self, name: str, beat: Callable[[], None], period: float) -> None:
        self._name, self._beat, self._period = name, beat, period
        self._closing = threading.Event()
        self._ended: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"{name} lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the thread: Busy or Fenced where the lease is lost, HpoError where it is a bug."""
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


def holder(connection: Connection, name: str) -> RowMapping | None:
    """The row of a lease that somebody holds, dead or alive; None where it is free."""
    row = connection.execute(select(leases).where(leases.c.name == name)).mappings().first()
    return None if row is None or row["owner"] is None else row


def free_of_the_dead(ledger: Ledger, name: str) -> None:
    """Free a lease whose holder is known to be dead; nobody else would before the next one takes it over."""

    def body(connection: Connection) -> None:
        row = holder(connection, name)
        if row is not None and is_dead(row["host"], row["pid"], row["pid_started"]):
            mine = (leases.c.name == name) & (leases.c.owner == row["owner"]) & (leases.c.fence == row["fence"])
            connection.execute(update(leases).where(mine).values(owner=None))

    ledger.transact(body)


def holders(connection: Connection) -> dict[str, RowMapping]:
    """Name -> row of every lease that somebody holds, dead or alive."""
    rows = connection.execute(select(leases)).mappings()
    return {row["name"]: row for row in rows if row["owner"] is not None}


def acquire(ledger: Ledger, name: str, study: str, process: Process, clock: Clock, timeout: float) -> Lease:
    """Take a study's lease, waiting up to `timeout` seconds for a silent owner on another host; Busy if it is alive."""
    deadline = clock.monotonic() + timeout
    first: tuple[int, int] | None = None
    while True:
        last_look = clock.monotonic() >= deadline
        result = ledger.transact(lambda c, first=first, last=last_look: _try(c, name, process, clock, first, last))
        if isinstance(result, int):
            return Lease(ledger, name, process.id, result)
        first = first or (result["fence"], result["renewals"])
        alive_here = result["host"] == process.host
        if alive_here or (result["fence"], result["renewals"]) != first:
            raise Busy(_busy(name, study, result))
        clock.sleep(min(1.0, timeout / 10))


def _try(
    connection: Connection, name: str, process: Process, clock: Clock, first: tuple[int, int] | None, last_look: bool
) -> int | dict[str, Any]:
    """The new fence if the lease was free, dead or silent; else its row."""
    row = connection.execute(select(leases).where(leases.c.name == name).with_for_update()).mappings().first()
    mine = {
        "owner": process.id,
        "host": process.host,
        "pid": process.pid,
        "pid_started": process.started,
        "since": clock.wall(),
    }
    if row is None:
        new = {"name": name, "fence": 1, **mine}
        if connection.execute(insert_new(connection, leases), new).rowcount == 1:
            return 1
        row = connection.execute(select(leases).where(leases.c.name == name).with_for_update()).mappings().one()
    if row["owner"] == process.id:
        return row["fence"]  # a retried commit that had gone through
    silent = last_look and first == (row["fence"], row["renewals"])
    if row["owner"] is not None and not silent and not is_dead(row["host"], row["pid"], row["pid_started"]):
        return dict(row)
    fence = row["fence"] + 1
    connection.execute(update(leases).where(leases.c.name == name).values(fence=fence, **mine))
    return fence


def _busy(name: str, study: str, row: dict[str, Any]) -> str:
    what, _, _ = name.partition(":")
    since = datetime.datetime.fromtimestamp(row["since"]).astimezone().isoformat(timespec="seconds")
    owner = f"host {row['host']}, pid {row['pid']}, since {since}"
    return f"study {study!r} already has a {what}: {owner}; wait for it or stop it."
