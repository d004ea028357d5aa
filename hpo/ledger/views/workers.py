"""Queries the activity of a study's workers: attempts, and the reports at which a worker may have waited."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from sqlalchemy import and_, func, or_, select

from hpo.ledger.database.tables import attempts, decisions, reports, trials, workers
from hpo.ledger.read import every
from hpo.ledger.rows import Connection, TrialRow, WorkedAttempt


class EpochReport(NamedTuple):
    """An epoch that a trial has reported, in seconds since 1970, and whether a decision answered it."""

    trial_id: int
    at: float
    decided: bool


def latest_attempts(connection: Connection, study_id: int, n: int) -> Sequence[WorkedAttempt]:
    """Returns the `n` newest attempts of a study in the order of their start.

    Each has the worker's executor and the times when the worker became ready (`ready`) and left in good order (`left`).
    """
    query = (
        select(
            *(attempts.c[name] for name in ("trial_id", "worker_id", "started_at", "ended_at")),
            workers.c.executor,
            workers.c.started_at.label("ready"),
            workers.c.ended_at.label("left"),
        )
        .join(trials, trials.c.id == attempts.c.trial_id)
        .join(workers, workers.c.id == attempts.c.worker_id)
        .where(trials.c.study_id == study_id)
        .order_by(attempts.c.started_at.desc())
        .limit(n)
    )
    return every(WorkedAttempt, connection.execute(query))[::-1]


def trained_with(connection: Connection, trial: TrialRow) -> list[int]:
    """Returns the numbers of the trials, including its own, whose newest attempts were in its group at the same time.

    A group takes in others as trials end.
    """
    if trial.group is None:
        return []
    newest = and_(attempts.c.trial_id == trials.c.id, attempts.c.fence == trials.c.fence)
    times = select(attempts.c.started_at, attempts.c.ended_at).join(trials, newest).where(trials.c.id == trial.id)
    began, ended = connection.execute(times).one()
    query = select(trials.c.number).join(attempts, newest).order_by(trials.c.number)
    query = query.where(trials.c.study_id == trial.study_id, trials.c.group == trial.group)
    query = query.where(or_(attempts.c.ended_at.is_(None), attempts.c.ended_at > began))
    return list(connection.execute(query if ended is None else query.where(attempts.c.started_at < ended)).scalars())


def fused(connection: Connection, study_id: int) -> tuple[int, int]:
    """Returns how many trials were trained as one model with others, and in how many groups."""
    size = func.count()
    query = select(size).where(trials.c.study_id == study_id, trials.c.group.is_not(None))
    sizes = connection.execute(query.group_by(trials.c.group).having(size > 1)).scalars().all()
    return sum(sizes), len(sizes)


def epoch_reports(connection: Connection, trial_ids: Collection[int]) -> Sequence[EpochReport]:
    """Returns the epochs that these trials have reported (fold 0), by trial and time."""
    answered = and_(decisions.c.trial_id == reports.c.trial_id, decisions.c.step == reports.c.step)
    at = func.min(reports.c.at)
    query = (
        select(reports.c.trial_id, at, func.count(decisions.c.step) > 0)
        .join(decisions, answered, isouter=True)
        .where(reports.c.trial_id.in_(trial_ids), reports.c.epoch.is_not(None), reports.c.fold == 0)
        .group_by(reports.c.trial_id, reports.c.step)
        .order_by(reports.c.trial_id, at)
    )
    return [EpochReport(row[0], row[1], bool(row[2])) for row in connection.execute(query)]
