"""Leases on names, without wall clocks: one driver and one mirror per study.

A lease is held while its owner renews its counter. Another process takes it over at once when the owner ran on the
same host and is dead, and otherwise when the counter has stood still for `timeout` seconds of the observer's own
monotonic clock. Taking over raises the fence, so whatever the old owner still tries is refused.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.engine import Connection

from hpo.clock import Clock
from hpo.errors import Busy
from hpo.ledger.process import Process, is_dead
from hpo.ledger.statements import CHECK_LEASE, insert_new
from hpo.ledger.store import Ledger
from hpo.ledger.tables import leases


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

    def renew(self) -> None:
        """Raise Busy if the lease is lost."""
        self.ledger.transact(self.check)

    def release(self) -> None:
        """Free the lease; harmless if it is lost already."""
        mine = (leases.c.name == self.name) & (leases.c.owner == self.owner) & (leases.c.fence == self.fence)
        self.ledger.transact(lambda connection: connection.execute(update(leases).where(mine).values(owner=None)))


def acquire(ledger: Ledger, name: str, process: Process, clock: Clock, timeout: float) -> Lease:
    """Take the lease, waiting up to `timeout` seconds for a silent owner on another host; raise Busy if it is alive."""
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
            raise Busy(_busy(name, result))
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


def _busy(name: str, row: dict[str, Any]) -> str:
    what, _, _ = name.partition(":")
    since = datetime.datetime.fromtimestamp(row["since"]).astimezone().isoformat(timespec="seconds")
    return (
        f"this study already has a {what}: host {row['host']}, pid {row['pid']}, since {since}; wait for it or stop it."
    )
