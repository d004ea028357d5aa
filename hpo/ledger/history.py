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

_KEYS = select(reports.c.key).where(reports.c.trial_id == bindparam("trial")).distinct().order_by(reports.c.key)

_STATES = (
    select(trials.c.id, trials.c.number, trials.c.state)
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
    """The curves of one study's first objective; those of trials that have ended are kept in memory."""

    def __init__(self, study_id: int, objective: Objective) -> None:
        self.study_id = study_id
        self.objective = objective
        self._sign = -1.0 if objective.direction == "maximize" else 1.0
        self._ended: dict[int, tuple[str, Curve]] = {}  # by number
        self._gap = 0  # the lowest number that is not among them

    def of(self, connection: Connection, trial_id: int) -> Curve:
        """(epoch, loss) of one trial, in order."""
        rows = connection.execute(_OWN, {"trial": trial_id, "metric": self.objective.metric})
        return [(epoch, math.nan if value is None else self._sign * value) for epoch, value in rows]

    def as_loss(self, value: float) -> float:
        return self._sign * value

    def upto(self, connection: Connection, last: int | None) -> dict[int, tuple[str, Curve]]:
        """Number -> (state, curve) of every trial <= `last`, or of all."""
        last = 2**31 - 1 if last is None else last
        seen = {number: entry for number, entry in self._ended.items() if number <= last}
        if self._gap > last:
            return seen
        rows = connection.execute(_STATES, {"study": self.study_id, "first": self._gap, "last": last})
        for trial_id, number, state in rows.all():
            if number not in seen:
                seen[number] = (state, self.of(connection, trial_id))
            if state in TERMINAL_STATES:
                self._ended[number] = seen[number]
        while self._gap in self._ended:
            self._gap += 1
        return dict(sorted(seen.items()))

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
