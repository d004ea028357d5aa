"""Bounds what the studies of one person use: trials that train at a time, and bytes of checkpoints.

A worker that claims a trial reads the bounds in the same transaction, so no number of workers exceeds them together.
Nothing that runs is stopped: waiting trials wait longer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass

from sqlalchemy import delete, func, insert, select
from sqlalchemy.engine import Connection

from hpo.ledger.audit import OWNER
from hpo.ledger.database.tables import checkpoints, quotas, studies, trials
from hpo.ledger.read import every
from hpo.text import command, counted, megabytes


@dataclass(frozen=True, slots=True)
class Quota:
    """The bounds of a person; None leaves one out. The table `quotas` describes its columns."""

    person: str
    trials: int | None
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Use:
    """The use of a person's studies: trials that train, and the bytes of kept checkpoints."""

    trials: int
    bytes: int


def all_quotas(connection: Connection) -> list[Quota]:
    """Returns all bounds, by person."""
    return every(Quota, connection.execute(select(quotas).order_by(quotas.c.person)))


def put(connection: Connection, quota: Quota) -> None:
    """Sets a person's bounds in place of earlier ones; a quota without bounds is deleted."""
    connection.execute(delete(quotas).where(quotas.c.person == quota.person))
    if (quota.trials, quota.bytes) != (None, None):
        connection.execute(insert(quotas).values(asdict(quota)))


def used(connection: Connection, person: str) -> Use:
    """Returns what the studies that a person began use."""
    theirs = select(studies.c.id).where(OWNER.in_([person]))
    running = select(func.count()).where(trials.c.study_id.in_(theirs), trials.c.state == "running")
    kept = select(func.coalesce(func.sum(checkpoints.c.size), 0)).join(trials)
    kept = kept.where(trials.c.study_id.in_(theirs), checkpoints.c.state == "kept")
    return Use(connection.execute(running).scalar_one(), int(connection.execute(kept).scalar_one()))


def room(connection: Connection, among: Collection[int]) -> Mapping[int, float]:
    """Returns study id -> the number of trials that its owner may begin now, infinite without a bound.

    Other claims for the same people wait until this transaction ends.
    """
    bounds = {quota.person: quota for quota in all_quotas(connection)}
    if not bounds:
        return dict.fromkeys(among, math.inf)
    owners = _owners(connection, among)
    left = {person: _left(connection, bounds[person]) for person in sorted(bounds.keys() & owners.values())}
    return {study_id: left.get(owner, math.inf) for study_id, owner in owners.items()}


def exhausted(connection: Connection, among: Collection[int]) -> list[str]:
    """Returns a sentence for each person whose studies among these may begin no trial now."""
    bounds = all_quotas(connection)
    owners = _owners(connection, among).values() if bounds else ()
    texts = [_full(quota, used(connection, quota.person)) for quota in bounds if quota.person in owners]
    return [text for text in texts if text]


def _owners(connection: Connection, among: Collection[int]) -> dict[int, str]:
    rows = connection.execute(select(studies.c.id, OWNER).where(studies.c.id.in_(list(among))))
    return {study_id: owner or "" for study_id, owner in rows}


def _left(connection: Connection, quota: Quota) -> float:
    if connection.dialect.name == "postgresql":  # SQLite has one writer at a time
        connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(quota.person))))
    use = used(connection, quota.person)
    if quota.bytes is not None and use.bytes >= quota.bytes:
        return 0
    return math.inf if quota.trials is None else max(0, quota.trials - use.trials)


def described(quota: Quota, use: Use) -> list[str]:
    """Returns `3 of 8 trials train` and `12.00 GB of 200.00 GB`, for the bounds that there are."""
    trains = [] if quota.trials is None else [f"{use.trials} of {counted(quota.trials, 'trial')} train"]
    kept = [] if quota.bytes is None else [f"{megabytes(use.bytes)} of {megabytes(quota.bytes)} kept"]
    return trains + kept


def _full(quota: Quota, use: Use) -> str:
    if quota.bytes is not None and use.bytes >= quota.bytes:
        return (
            f"the checkpoints of {quota.person} take {megabytes(use.bytes)} of a quota of {megabytes(quota.bytes)}: "
            f"new trials wait, and `{command('gc')}` makes room."
        )
    if quota.trials is not None and use.trials >= quota.trials:
        return f"{quota.person} has a quota of {counted(quota.trials, 'trial')} at a time: further trials wait."
    return ""
