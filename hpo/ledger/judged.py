"""Reads where trials were judged: the step of their values, and all that was reported there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, select, tuple_

from hpo.ledger.database.tables import reports
from hpo.ledger.rows import Connection, StudyRow, TrialRow

PAGE = 500  # trials read at once: SQLite takes 32766 parameters
of_fold_0 = reports.c.trial_id.in_(bindparam("trials", expanding=True)) & (reports.c.fold == 0)


@dataclass(frozen=True)
class Judged:
    """The step at which a trial was judged, the epoch that it closes, and all that was reported there (fold 0)."""

    step: int
    epoch: int
    metrics: dict[str, float]


_of_objectives = of_fold_0 & reports.c.epoch.is_not(None) & reports.c.key.in_(bindparam("metrics", expanding=True))
# The database compares, because most of a trial's reports are of another step.
_with_a_value = select(reports.c.trial_id, reports.c.step).where(
    _of_objectives,
    tuple_(reports.c.trial_id, reports.c.key, reports.c.value).in_(bindparam("values", expanding=True))
    | (reports.c.value.is_(None) & reports.c.trial_id.in_(bindparam("unvalued", expanding=True))),
)
_OBJECTIVES = (
    select(reports.c.trial_id, reports.c.step, reports.c.epoch, reports.c.key, reports.c.value)
    .where(_of_objectives, tuple_(reports.c.trial_id, reports.c.step).in_(_with_a_value))
    .order_by(reports.c.trial_id, reports.c.step)
)
_AT = select(reports.c.trial_id, reports.c.key, reports.c.value).where(
    reports.c.trial_id.in_(bindparam("trials", expanding=True)),  # SQLite finds no index for pairs alone
    tuple_(reports.c.trial_id, reports.c.step).in_(bindparam("places", expanding=True)),
    reports.c.fold == 0,
)


def judged(connection: Connection, study: StudyRow, rows: Sequence[TrialRow]) -> dict[int, Judged]:
    """Returns trial id -> the step at which it was judged, for the rows of trials that have values.

    At that step the objectives have these values: the last such step, or with `select="best"` the first, as
    `Curves.judge` chose.
    """
    objectives = study.spec.objectives
    metrics, first = [objective["metric"] for objective in objectives], objectives[0]["select"] == "best"
    values = {row.id: list(row.values) for row in rows if row.values}
    judged_at: dict[int, Judged] = {}
    for start in range(0, len(values), PAGE):
        points: dict[tuple[int, int, int], dict[str, float]] = {}
        page = list(values)[start : start + PAGE]
        where = {"trials": page, "metrics": metrics} | _first_values(metrics, {id_: values[id_] for id_ in page})
        for trial_id, step, epoch, key, value in connection.execute(_OBJECTIVES, where):
            points.setdefault((trial_id, step, epoch), {})[key] = value
        at: dict[int, Judged] = {}
        for (trial_id, step, epoch), point in points.items():
            if [point.get(metric) for metric in metrics] == values[trial_id] and not (first and trial_id in at):
                at[trial_id] = Judged(step, epoch, {})
        places = [(trial_id, point.step) for trial_id, point in at.items()]
        looked_up = {"trials": list(at), "places": places}
        for trial_id, key, value in connection.execute(_AT, looked_up) if at else ():
            at[trial_id].metrics[key] = math.nan if value is None else value
        judged_at |= at
    return judged_at


def _first_values(metrics: Sequence[str], values: Mapping[int, Sequence[float | None]]) -> dict[str, Any]:
    """Returns the parameters of `_with_a_value`: each trial's first value, and the trials without one."""
    firsts: list[tuple[int, str, float]] = []
    for trial_id, row in values.items():
        firsts += [(trial_id, key, value) for key, value in zip(metrics, row, strict=False) if value is not None][:1]
    return {"values": firsts, "unvalued": list(values.keys() - {trial_id for trial_id, *_ in firsts})}
