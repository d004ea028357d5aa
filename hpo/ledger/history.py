"""What a strategy may read, from the ledger: the objective's curves, as losses (lower is better).

Only closed epochs of fold 0 count. A trial that has ended never changes, so its curve is read once.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from sqlalchemy import bindparam, select
from sqlalchemy.engine import Connection

from hpo.config import near
from hpo.ledger.tables import TERMINAL_STATES, checkpoints, machine_dependent, reports, trials
from hpo.objective import Objective
from trainer.report import Outcome

Curve = list[tuple[int, float]]
PAGE = 500  # trials read at once: SQLite takes 32766 parameters

_OWN = (
    select(reports.c.epoch, reports.c.value)
    .where(
        reports.c.trial_id == bindparam("trial"),
        reports.c.key == bindparam("metric"),
        reports.c.fold == 0,
        reports.c.epoch.is_not(None),
    )
    .order_by(reports.c.step)
)

_MANY = (
    select(reports.c.trial_id, reports.c.epoch, reports.c.value)
    .where(
        reports.c.trial_id.in_(bindparam("trials", expanding=True)),
        reports.c.key == bindparam("metric"),
        reports.c.fold == 0,
        reports.c.epoch.is_not(None),
    )
    .order_by(reports.c.trial_id, reports.c.step)
)

_KEYS = select(reports.c.key).where(reports.c.trial_id == bindparam("trial")).distinct().order_by(reports.c.key)

_STATES = (
    select(trials.c.id, trials.c.number, trials.c.state, trials.c.revision)
    .where(
        trials.c.study_id == bindparam("study"),
        trials.c.number >= bindparam("first"),
        trials.c.number <= bindparam("last"),
    )
    .order_by(trials.c.number)
)


_NEWEST_CHECKPOINT = (
    select(checkpoints.c.path)
    .join(trials, trials.c.id == checkpoints.c.trial_id)
    .where(
        trials.c.study_id == bindparam("study"),
        trials.c.number == bindparam("trial"),
        checkpoints.c.state == "kept",
    )
    .order_by(checkpoints.c.step.desc(), checkpoints.c.id.desc())
    .limit(1)
)


class Curves:
    """The curves of one study's first objective. What was read is kept in memory until its trial changes."""

    def __init__(self, study_id: int, objective: Objective) -> None:
        self.study_id = study_id
        self.objective = objective
        self._sign = -1.0 if objective.direction == "maximize" else 1.0
        self._kept: dict[int, tuple[int, str, Curve]] = {}  # number -> the trial's revision, its state, its curve
        self._gap = 0  # every trial below has ended, and never changes

    def of(self, connection: Connection, trial_id: int) -> Curve:
        """(epoch, loss) of one trial, in order."""
        rows = connection.execute(_OWN, {"trial": trial_id, "metric": self.objective.metric})
        return [(epoch, self._loss(value)) for epoch, value in rows]

    def _loss(self, value: float | None) -> float:
        return math.nan if value is None else self._sign * value

    def as_loss(self, value: float) -> float:
        return self._sign * value

    def upto(self, connection: Connection, last: int | None) -> dict[int, tuple[str, Curve]]:
        """Number -> (state, curve) of every trial <= `last`, or of all."""
        last = 2**31 - 1 if last is None else last
        if self._gap <= last:
            self._read(connection, last)
        return {number: (state, curve) for number, (_, state, curve) in sorted(self._kept.items()) if number <= last}

    def _read(self, connection: Connection, last: int) -> None:
        rows = connection.execute(_STATES, {"study": self.study_id, "first": self._gap, "last": last}).all()
        new = [row for row in rows if self._kept.get(row.number, (None,))[0] != row.revision]
        curves: dict[int, Curve] = {row.id: [] for row in new}
        for start in range(0, len(new), PAGE):
            where = {"trials": [row.id for row in new[start : start + PAGE]], "metric": self.objective.metric}
            for trial_id, epoch, value in connection.execute(_MANY, where):
                curves[trial_id].append((epoch, self._loss(value)))
        for row in new:
            # Of a trial that trains this may be read within a transaction that comes to nothing: read it anew.
            revision = row.revision if row.state != "running" else -1
            self._kept[row.number] = (revision, row.state, curves[row.id])
        ended = {row.number for row in rows if row.state in TERMINAL_STATES}
        while self._gap in ended:
            self._gap += 1

    def judge(self, connection: Connection, trial_id: int, outcome: Outcome) -> tuple[Outcome, list[float] | None]:
        """The value a trial ends with, by its objective's `select`; nothing that failed is scored.

        A complete trial whose objective is missing has failed; one whose objective is not finite is infeasible.
        """
        curve = self.of(connection, trial_id)
        metric = self.objective.metric
        if not curve:
            if outcome.kind != "complete":
                return outcome, None
            reported = [key for (key,) in connection.execute(_KEYS, {"trial": trial_id}) if not machine_dependent(key)]
            error = (
                f"the task never reported {metric!r} at the end of an epoch, but {', '.join(reported) or 'nothing'}: "
                f"return it from evaluate(){near(metric, reported) or '.'}"
            )
            return Outcome("user_error", outcome.step, outcome.epoch, error=error), None
        losses = [loss for _, loss in curve]
        if self.objective.select == "best":
            losses = [min((loss for loss in losses if math.isfinite(loss)), default=losses[-1])]
        if math.isfinite(losses[-1]):
            return outcome, [self._sign * losses[-1]]
        if outcome.kind != "complete":
            return outcome, None
        return Outcome("nonfinite", outcome.step, outcome.epoch, error=f"{metric} is not finite at the end."), None


class LedgerHistory:
    """A hpo.search.strategy.History inside the transaction of a report."""

    def __init__(
        self,
        curves: Curves,
        connection: Connection,
        trial_id: int,
        number: int,
        epoch: int,
        value: float,
        limit: int | None,
    ) -> None:
        self.number, self.epoch = number, epoch
        self.value = curves.as_loss(value)
        self._curves, self._connection = curves, connection
        self._trial_id, self._limit = trial_id, limit

    @property
    def curve(self) -> Curve:
        """The trial's own (epoch, loss), this epoch included."""
        return self._curves.of(self._connection, self._trial_id)

    def at(self, epoch: int) -> dict[int, float]:
        """Number -> loss of the other visible trials that reached `epoch`."""
        found = {}
        for number, (_, curve) in self._visible().items():
            value = next((loss for reached, loss in curve if reached == epoch), None)
            if value is not None:
                found[number] = value
        return found

    def curves(self, states: Collection[str] = ("complete",)) -> dict[int, Curve]:
        """Number -> curve of the other visible trials in one of `states`."""
        return {number: curve for number, (state, curve) in self._visible().items() if state in states}

    def checkpoint(self, number: int) -> str | None:
        """The newest kept checkpoint of another visible trial, as `<trial number>/<path>`."""
        if self._limit is not None and number > self._limit:
            return None
        where = {"study": self._curves.study_id, "trial": number}
        path = self._connection.execute(_NEWEST_CHECKPOINT, where).scalar()
        return path and f"{number}/{path}"

    def _visible(self) -> dict[int, tuple[str, Curve]]:
        visible = self._curves.upto(self._connection, self._limit)
        visible.pop(self.number, None)
        return visible
