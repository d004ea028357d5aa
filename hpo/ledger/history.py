"""What a strategy may read, from the ledger: the objectives' curves, as losses (lower is better).

Only closed epochs of fold 0 count. A trial that has ended never changes, so its curve is read once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import bindparam, select
from sqlalchemy.engine import Connection

from hpo.config import near
from hpo.ledger import statements as sql
from hpo.ledger.tables import TERMINAL_STATES, machine_dependent, reports, trials
from hpo.objective import Constraint, Objective
from trainer.report import Outcome, OutcomeKind

Curve = list[tuple[int, Any]]  # (epoch, loss); with several objectives a loss is a tuple, one for each
PAGE = 500  # trials read at once: SQLite takes 32766 parameters

_POINT = (reports.c.step, reports.c.epoch, reports.c.key, reports.c.value)
_CLOSED = reports.c.key.in_(bindparam("metrics", expanding=True)) & (reports.c.fold == 0) & reports.c.epoch.is_not(None)
_OWN = select(*_POINT).where(reports.c.trial_id == bindparam("trial"), _CLOSED).order_by(reports.c.step)

_MANY = (
    select(reports.c.trial_id, *_POINT)
    .where(reports.c.trial_id.in_(bindparam("trials", expanding=True)), _CLOSED)
    .order_by(reports.c.trial_id, reports.c.step)
)

_KEYS = select(reports.c.key).where(reports.c.trial_id == bindparam("trial")).distinct().order_by(reports.c.key)

# The newest value of a metric that was reported no later than a step.
_LAST = (
    select(reports.c.value)
    .where(
        reports.c.trial_id == bindparam("trial"),
        reports.c.key == bindparam("metric"),
        reports.c.fold == 0,
        reports.c.step <= bindparam("at_step"),
    )
    .order_by(reports.c.step.desc())
    .limit(1)
)

_STATES = (
    select(trials.c.id, trials.c.number, trials.c.state, trials.c.revision)
    .where(
        trials.c.study_id == bindparam("study"),
        trials.c.number >= bindparam("first"),
        trials.c.number <= bindparam("last"),
    )
    .order_by(trials.c.number)
)


@dataclass(frozen=True)
class Judgement:
    """How a trial ends: its outcome, a value per objective and, by constraint, how far it is beyond the bounds."""

    outcome: Outcome
    values: list[float] | None = None
    violations: list[float] | None = None


class Curves:
    """The curves of one study's objectives. What was read is kept in memory until its trial changes."""

    def __init__(self, study_id: int, objectives: Sequence[Objective], constraints: Sequence[Constraint] = ()) -> None:
        self.study_id = study_id
        self.objectives, self.constraints = objectives, constraints
        self.metrics = [objective.metric for objective in objectives]
        self._signs = [-1.0 if objective.direction == "maximize" else 1.0 for objective in objectives]
        # Number -> the trial's revision, its state, its curve; ascending, since trials are read in order.
        self._kept: dict[int, tuple[int, str, Curve]] = {}
        self._gap = 0  # every trial below has ended, and never changes

    def of(self, connection: Connection, trial_id: int) -> Curve:
        """(epoch, loss) of one trial, in order."""
        return [(epoch, loss) for _, epoch, loss in self._steps(connection, trial_id)]

    def _steps(self, connection: Connection, trial_id: int) -> list[tuple[int, int, Any]]:
        """(step, epoch, loss) of one trial, in order."""
        return self._points(connection.execute(_OWN, {"trial": trial_id, "metrics": self.metrics}))

    def _points(self, rows: Iterable[Any]) -> list[tuple[int, int, Any]]:
        """(step, epoch, loss) where every objective was reported, of rows (step, epoch, key, value) in order."""
        found: dict[tuple[int, int], dict[str, float]] = {}
        for step, epoch, key, value in rows:
            found.setdefault((step, epoch), {})[key] = math.nan if value is None else value
        return [(*at, self.loss(own)) for at, own in found.items() if len(own) == len(self.metrics)]

    def loss(self, values: Mapping[str, float]) -> Any:
        """The loss of the objectives' values, by metric."""
        return self.flipped([values[metric] for metric in self.metrics])

    def flipped(self, values: Sequence[float]) -> Any:
        """Values as a loss, and a loss's parts as values."""
        signed = [sign * value for sign, value in zip(self._signs, values, strict=True)]
        return tuple(signed) if len(signed) > 1 else signed[0]

    def upto(self, connection: Connection, last: int | None) -> dict[int, tuple[str, Curve]]:
        """Number -> (state, curve) of every trial <= `last`, or of all."""
        last = 2**31 - 1 if last is None else last
        if self._gap <= last:
            self._read(connection, last)
        return {number: (state, curve) for number, (_, state, curve) in self._kept.items() if number <= last}

    def _read(self, connection: Connection, last: int) -> None:
        rows = connection.execute(_STATES, {"study": self.study_id, "first": self._gap, "last": last}).all()
        new = [row for row in rows if self._kept.get(row.number, (None,))[0] != row.revision]
        curves: dict[int, Curve] = {row.id: [] for row in new}
        for start in range(0, len(new), PAGE):
            where = {"trials": [row.id for row in new[start : start + PAGE]], "metrics": self.metrics}
            for trial_id, rows in groupby(connection.execute(_MANY, where), itemgetter(0)):
                curves[trial_id] = [(epoch, loss) for _, epoch, loss in self._points(row[1:] for row in rows)]
        for row in new:
            # Of a trial that trains this may be read within a transaction that comes to nothing: read it anew.
            revision = row.revision if row.state != "running" else -1
            self._kept[row.number] = (revision, row.state, curves[row.id])
        ended = {row.number for row in rows if row.state in TERMINAL_STATES}
        while self._gap in ended:
            self._gap += 1

    def judge(self, connection: Connection, trial_id: int, outcome: Outcome) -> Judgement:
        """What a trial ends with that is complete or pruned; nothing that failed is scored.

        All values are of one epoch: the last, or by `select` of the first objective its best. Constraints are held
        against what was reported up to there. A complete trial whose objective or constraint is missing has failed; one
        of which either is not finite, or a constraint broken, is infeasible.
        """
        points = self._steps(connection, trial_id)
        if not points:
            missing = outcome.kind == "complete"
            return Judgement(self._missing(connection, trial_id, outcome, self.metrics) if missing else outcome)
        step, _, loss = self._selected(points)
        values = [self.flipped([loss])] if len(self.metrics) == 1 else list(self.flipped(loss))
        if not all(map(math.isfinite, values)):
            odd = next(metric for metric, value in zip(self.metrics, values, strict=True) if not math.isfinite(value))
            return Judgement(_ended(outcome, "nonfinite", f"{odd} is not finite at the end."))
        return self._constrained(connection, trial_id, outcome, values, step)

    def _constrained(
        self, connection: Connection, trial_id: int, outcome: Outcome, values: list[float], step: int
    ) -> Judgement:
        if not self.constraints:
            return Judgement(outcome, values)
        held = {one.metric: self._last(connection, trial_id, one.metric, step) for one in self.constraints}
        if unheard := [metric for metric, value in held.items() if value is None]:
            missing = outcome.kind == "complete"
            return (
                Judgement(self._missing(connection, trial_id, outcome, unheard))
                if missing
                else Judgement(outcome, values)
            )
        found = {metric: value for metric, value in held.items() if value is not None and math.isfinite(value)}
        if odd := held.keys() - found.keys():
            return Judgement(_ended(outcome, "nonfinite", f"{min(odd)} is not finite at the end."), values)
        violations = [one.violation(found[one.metric]) for one in self.constraints]
        broken = [one for one, beyond in zip(self.constraints, violations, strict=True) if beyond > 0]
        if broken:
            outcome = _ended(outcome, "infeasible", "; ".join(one.broken_by(found[one.metric]) for one in broken) + ".")
        return Judgement(outcome, values, violations)

    def _selected(self, points: Sequence[tuple[int, int, Any]]) -> tuple[int, int, Any]:
        """The point that a trial is judged at."""
        finite = [one for one in points if all(map(math.isfinite, _parts(one[2])))]
        if self.objectives[0].select == "last" or not finite:
            return points[-1]
        return min(finite, key=lambda one: _parts(one[2])[0])

    def _last(self, connection: Connection, trial_id: int, metric: str, step: int) -> float | None:
        row = connection.execute(_LAST, {"trial": trial_id, "metric": metric, "at_step": step}).first()
        if row is None:
            return None
        return math.nan if row.value is None else row.value

    def _missing(self, connection: Connection, trial_id: int, outcome: Outcome, metrics: Sequence[str]) -> Outcome:
        """The end of a complete trial that never reported these, or, if each, then never together."""
        reported = [key for (key,) in connection.execute(_KEYS, {"trial": trial_id})]
        metric = next((one for one in metrics if one not in reported), " with ".join(metrics))
        shown = [key for key in reported if not machine_dependent(key)]
        error = (
            f"the task never reported {metric!r} at the end of an epoch, but {', '.join(shown) or 'nothing'}: "
            f"return it from evaluate(){near(metric, shown) or '.'}"
        )
        return _ended(outcome, "user_error", error)


def _parts(loss: Any) -> tuple[float, ...]:
    return loss if isinstance(loss, tuple) else (loss,)


def _ended(outcome: Outcome, kind: OutcomeKind, error: str) -> Outcome:
    """How a complete trial has ended after all; what was stopped stays so."""
    return Outcome(kind, outcome.step, outcome.epoch, error=error) if outcome.kind == "complete" else outcome


class LedgerHistory:
    """A hpo.search.strategy.History inside the transaction of a report."""

    def __init__(
        self,
        curves: Curves,
        connection: Connection,
        trial_id: int,
        number: int,
        epoch: int,
        loss: Any,
        limit: int | None,
    ) -> None:
        self.number, self.epoch = number, epoch
        self.value = loss
        self._curves, self._connection = curves, connection
        self._trial_id, self._limit = trial_id, limit

    @property
    def curve(self) -> Curve:
        """The trial's own (epoch, loss), this epoch included."""
        return self._curves.of(self._connection, self._trial_id)

    def at(self, epoch: int) -> dict[int, Any]:
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
        path = self._connection.execute(sql.NEWEST, where).scalar()
        return path and f"{number}/{path}"

    def _visible(self) -> dict[int, tuple[str, Curve]]:
        visible = self._curves.upto(self._connection, self._limit)
        visible.pop(self.number, None)
        return visible
