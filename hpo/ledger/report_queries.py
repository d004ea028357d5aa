"""Queries of a study's report: what befell the study itself, and means over a trial's reports."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import bindparam, func, select

from hpo.ledger.rows import Connection, RowMapping
from hpo.ledger.tables import events, reports, trials

_OF_STUDY = (
    select(events.c.kind, events.c.fields, events.c.at)
    .where(events.c.study_id == bindparam("study"), events.c.trial_id.is_(None))
    .where(events.c.kind.in_(bindparam("kinds", expanding=True)))
    .order_by(events.c.id)
)
_MEANS = (
    select(trials.c.number, func.avg(reports.c.value).label("mean"))
    .join(trials, trials.c.id == reports.c.trial_id)
    .where(trials.c.study_id == bindparam("study"), reports.c.key == bindparam("key"), reports.c.value.is_not(None))
    .group_by(trials.c.number)
)
_REPLAYED = select(func.count()).where(events.c.study_id == bindparam("study"), events.c.kind == bindparam("kind"))


def study_events(connection: Connection, study_id: int, kinds: Sequence[str]) -> Sequence[RowMapping]:
    """The events of these kinds that are of no trial, in their order: `kind`, `fields` and `at`."""
    return connection.execute(_OF_STUDY, {"study": study_id, "kinds": list(kinds)}).mappings().all()


def count_events(connection: Connection, study_id: int, kind: str) -> int:
    """How often an event of this kind happened, of the study's trials too."""
    return connection.execute(_REPLAYED, {"study": study_id, "kind": kind}).scalar_one()


def means(connection: Connection, study_id: int, key: str) -> dict[int, float]:
    """Trial number -> the mean of all it has reported of a metric; without the trials that have reported none."""
    return {row.number: row.mean for row in connection.execute(_MEANS, {"study": study_id, "key": key})}
