"""Queries what a monitoring system watches of all studies at once, each figure by one query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import and_, case, func, or_, select

from hpo.ledger.database.tables import attempts, checkpoints, mirrors, reports, studies, trials
from hpo.ledger.removed import is_shown
from hpo.ledger.rows import Connection
from hpo.ledger.views.mirror import STUDY


class StudyState(NamedTuple):
    """A study by its id, with the state in its row and the longest silence of its workers, in seconds."""

    id: int
    name: str
    state: str
    lease_seconds: float


class InState(NamedTuple):
    """The trials of a study in one state, the epochs they have trained, and the transactions that changed them."""

    study_id: int
    state: str
    trials: int
    epochs: int
    transactions: int


class Trained(NamedTuple):
    """A trial in training: its attempt, and when it last reported, or began, in seconds since 1970."""

    study_id: int
    trial_id: int
    fence: int
    renewals: int
    at: float


def every_study(connection: Connection) -> Sequence[StudyState]:
    """Returns all studies in the order of their start."""
    query = select(studies.c.id, studies.c.name, studies.c.state, studies.c.lease_seconds).order_by(studies.c.id)
    return [StudyState(*row) for row in connection.execute(query)]


def by_state(connection: Connection) -> Sequence[InState]:
    """Returns the trials of all studies, removed ones included, by study and state."""
    sums = func.sum(trials.c.epoch - trials.c.from_epoch), func.sum(trials.c.revision)
    query = select(trials.c.study_id, trials.c.state, func.count(), *sums)
    rows = connection.execute(query.group_by(trials.c.study_id, trials.c.state))
    return [InState(row[0], row[1], row[2], int(row[3]), int(row[4])) for row in rows]


def in_training(connection: Connection) -> Sequence[Trained]:
    """Returns the trials of all studies that are in training."""
    newest = and_(attempts.c.trial_id == trials.c.id, attempts.c.fence == trials.c.fence)
    last = (
        select(func.max(reports.c.at))
        .where(reports.c.trial_id == trials.c.id, reports.c.step == trials.c.step)
        .scalar_subquery()
    )
    query = (
        select(trials.c.study_id, trials.c.id, trials.c.fence, attempts.c.renewals, attempts.c.started_at, last)
        .join(attempts, newest)
        .where(trials.c.state == "running")
    )
    return [Trained(*row[:4], max(row[4], row[5] or 0.0)) for row in connection.execute(query)]


def kept_bytes(connection: Connection) -> dict[int, int]:
    """Returns study id -> the bytes of its kept checkpoints; omits studies that keep none."""
    query = select(trials.c.study_id, func.sum(checkpoints.c.size)).join(trials).where(checkpoints.c.state == "kept")
    return {row[0]: int(row[1]) for row in connection.execute(query.group_by(trials.c.study_id))}


def behind(connection: Connection) -> dict[int, int]:
    """Returns study id -> how many of the ledger's transactions on its trials the tracker furthest behind lacks.

    Omits studies of which no tracker has anything yet.
    """
    known = select(mirrors.c.tracker, mirrors.c.study_id).where(mirrors.c.number == STUDY).subquery()
    cursor = and_(
        mirrors.c.tracker == known.c.tracker,
        mirrors.c.study_id == trials.c.study_id,
        mirrors.c.number == trials.c.number,
    )
    sent = func.coalesce(mirrors.c.revision, 0)
    begun = or_(trials.c.fence > 0, trials.c.ended_at.is_not(None))
    lacks = and_(begun, trials.c.revision > sent, is_shown)
    joined = known.outerjoin(trials, known.c.study_id == trials.c.study_id).outerjoin(mirrors, cursor)
    lacking = func.coalesce(func.sum(case((lacks, trials.c.revision - sent), else_=0)), 0)
    query = select(known.c.study_id, lacking).select_from(joined).group_by(known.c.tracker, known.c.study_id)
    most: dict[int, int] = {}
    for study_id, count in connection.execute(query):
        most[study_id] = max(most.get(study_id, 0), int(count))
    return most
