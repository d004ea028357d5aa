"""Queries for a study's report: events of the study itself, and means over a trial's reports."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import bindparam, exists, func, select

from hpo.ledger.database.tables import events, reports, trials
from hpo.ledger.read import every
from hpo.ledger.removed import is_shown
from hpo.ledger.rows import Connection, EventRow

_OF_KINDS = (
    select(events)
    .where(events.c.study_id == bindparam("study"), events.c.kind.in_(bindparam("kinds", expanding=True)))
    .order_by(events.c.id)
)
_OF_STUDY, _OF_TRIALS = _OF_KINDS.where(events.c.trial_id.is_(None)), _OF_KINDS.where(events.c.trial_id.is_not(None))
_MEANS = (
    select(trials.c.number, func.avg(reports.c.value).label("mean"))
    .join(trials, trials.c.id == reports.c.trial_id)
    .where(trials.c.study_id == bindparam("study"), reports.c.key == bindparam("key"), reports.c.value.is_not(None))
    .group_by(trials.c.number)
)
_of_metrics = (
    (reports.c.trial_id == trials.c.id) & (reports.c.fold == 0) & reports.c.key.in_(bindparam("keys", expanding=True))
)
_REPORTED = select(trials.c.id).where(trials.c.study_id == bindparam("study"), exists().where(_of_metrics))
_CLOSING = _REPORTED.where(is_shown, exists().where(_of_metrics, reports.c.epoch.is_not(None))).limit(1)


def study_events(connection: Connection, study_id: int, kinds: Sequence[str]) -> Sequence[EventRow]:
    """Returns the events of these kinds that belong to no trial, in their order."""
    return every(EventRow, connection.execute(_OF_STUDY, {"study": study_id, "kinds": list(kinds)}))


def trial_events(connection: Connection, study_id: int, kinds: Sequence[str]) -> Sequence[EventRow]:
    """Returns the events of these kinds that belong to a trial of the study, in their order."""
    return every(EventRow, connection.execute(_OF_TRIALS, {"study": study_id, "kinds": list(kinds)}))


def means(connection: Connection, study_id: int, key: str) -> dict[int, float]:
    """Returns trial number -> the mean of all its reports of a metric; omits trials without any."""
    return {row.number: row.mean for row in connection.execute(_MEANS, {"study": study_id, "key": key})}


def reported(connection: Connection, study_id: int, keys: Sequence[str], numbers: Sequence[int] = ()) -> set[int]:
    """Returns the ids of the trials, of all or of these numbers, that have reported one of the metrics in fold 0."""
    query = _REPORTED.where(trials.c.number.in_(numbers)) if numbers else _REPORTED
    return set(connection.execute(query, {"study": study_id, "keys": list(keys)}).scalars())


def by_epoch(connection: Connection, study_id: int, keys: Sequence[str]) -> bool:
    """Returns whether a report of one of these metrics has closed an epoch."""
    return connection.execute(_CLOSING, {"study": study_id, "keys": list(keys)}).first() is not None
