"""The rows that a trial's run is made of, of many trials in one query per table."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import and_, bindparam, func, not_, or_, select
from sqlalchemy.engine import Connection, RowMapping

from hpo.ledger import queries
from hpo.ledger.tables import attempts, checkpoints, decisions, events, mirrors, reports, trials
from hpo.space.trial_state import TERMINAL_STATES

LARGEST = 1.7976931348623157e308  # what MLflow stores of an infinity

cursor = and_(
    mirrors.c.tracker == bindparam("tracker"),
    mirrors.c.study_id == trials.c.study_id,
    mirrors.c.number == trials.c.number,
)
sent = func.coalesce(mirrors.c.revision, 0)

_earlier = reports.alias()
_VALUES = (
    select(
        *(reports.c[name] for name in ("trial_id", "step", "key", "fold", "epoch", "value", "at", "revision")),
        # The step's epoch is sent once, with the timestamp of the first transaction that closed it.
        not_(
            select(_earlier.c.step)
            .where(
                _earlier.c.trial_id == reports.c.trial_id,
                _earlier.c.step == reports.c.step,
                _earlier.c.fold == reports.c.fold,
                _earlier.c.epoch.is_not(None),
                _earlier.c.revision < reports.c.revision,
            )
            .exists()
        ).label("first"),
    )
    .select_from(reports.join(trials, trials.c.id == reports.c.trial_id).outerjoin(mirrors, cursor))
    .where(reports.c.trial_id.in_(bindparam("trials", expanding=True)), reports.c.revision > sent)
    .order_by(reports.c.trial_id, reports.c.step, reports.c.fold, reports.c.key)
)
_NONFINITE = (
    select(reports.c.trial_id, reports.c.key, reports.c.fold)
    .where(
        reports.c.trial_id.in_(bindparam("trials", expanding=True)),
        or_(reports.c.value.is_(None), reports.c.value > LARGEST, reports.c.value < -LARGEST),
    )
    .distinct()
)
_CHECKPOINTS = (
    select(checkpoints)
    .where(checkpoints.c.trial_id.in_(bindparam("trials", expanding=True)))
    .order_by(checkpoints.c.trial_id, checkpoints.c.step, checkpoints.c.id)
)
_EVENTS = (
    select(events.c.trial_id, events.c.kind, events.c.fields, events.c.revision)
    .where(events.c.trial_id.in_(bindparam("trials", expanding=True)), events.c.kind.in_(("artifact", "out_of_memory")))
    .order_by(events.c.trial_id, events.c.id)
)
_SAVED = (  # what was reported where a checkpoint was taken
    select(*(reports.c[name] for name in ("trial_id", "step", "key", "fold", "value", "at")))
    .join(
        checkpoints,
        and_(
            checkpoints.c.trial_id == reports.c.trial_id,
            checkpoints.c.step == reports.c.step,
            checkpoints.c.state == "kept",
        ),
    )
    .where(reports.c.trial_id.in_(bindparam("trials", expanding=True)))
    .order_by(reports.c.trial_id, reports.c.step, reports.c.fold, reports.c.key)
    .distinct()
)
_STOPS = (
    select(decisions.c.trial_id, decisions.c.step, decisions.c.strategy, decisions.c.reason)
    .where(decisions.c.trial_id.in_(bindparam("trials", expanding=True)), decisions.c.verdict.in_(("stop", "pause")))
    .order_by(decisions.c.trial_id, decisions.c.step)
)
_PREEMPTIONS = (
    select(attempts.c.trial_id, func.count().label("times"))
    .where(attempts.c.trial_id.in_(bindparam("trials", expanding=True)), attempts.c.outcome == "preempted")
    .group_by(attempts.c.trial_id)
)


class Facts:
    """The rows that belong to some trials, read in one query per table."""

    def __init__(self, connection: Connection, tracker: str, study: RowMapping, rows: Sequence[RowMapping]) -> None:
        ids = [row["id"] for row in rows]
        self.values = _grouped(connection.execute(_VALUES, {"tracker": tracker, "trials": ids}).mappings())
        self.checkpoints = _grouped(connection.execute(_CHECKPOINTS, {"trials": ids}).mappings())
        told = connection.execute(_EVENTS, {"trials": ids}).mappings().all()
        self.artifacts = _grouped(row for row in told if row["kind"] == "artifact")
        self.shrunk = _grouped(row for row in told if "micro_batch_size" in row["fields"])
        self.preemptions = {row.trial_id: row.times for row in connection.execute(_PREEMPTIONS, {"trials": ids})}
        over = [row for row in rows if row["state"] in TERMINAL_STATES]
        ended = [row["id"] for row in over]
        saved = [trial for trial in ended if trial in self.checkpoints]
        self.last, self.judged = queries.last_values(connection, ended), queries.judged(connection, study, over)
        self.saved = _grouped(connection.execute(_SAVED, {"trials": saved}).mappings()) if saved else {}
        pruned = [row["id"] for row in rows if row["state"] == "pruned"]
        self.stops = _grouped(connection.execute(_STOPS, {"trials": pruned}).mappings()) if pruned else {}
        odd = [trial for trial, values in self.values.items() if any(not finite(row["value"]) for row in values)]
        self.nonfinite = _grouped(connection.execute(_NONFINITE, {"trials": odd}).mappings()) if odd else {}


def _grouped(rows: Iterable[Any]) -> dict[int, list[Any]]:
    groups: dict[int, list[Any]] = defaultdict(list)
    for row in rows:
        groups[row["trial_id"]].append(row)
    return groups


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
