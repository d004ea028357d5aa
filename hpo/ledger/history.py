"""Reads the curves of a study's objectives, as losses, and judges trials by them.

Lower losses are better; NaN stands for a value that is not finite. Only closed epochs of fold 0 count. A trial that has
ended never changes, so its curve is read once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import bindparam, func, select
from sqlalchemy.engine import Connection

from hpo.ledger.database.tables import reports, trials
from hpo.ledger.names import machine_dependent
from hpo.search.curves import Curve, Group, Rankings
from hpo.search.pareto import Losses, Ranking, beyond
from hpo.space.objective import Constraint, Objective
from hpo.space.trial_state import TERMINAL_STATES, UNSETTLED
from hpo.text import near
from trainer.report import Outcome, OutcomeKind

PAGE = 500  # trials read at once: SQLite takes 32766 parameters

BLOCK = 64  # trials that are checked for changes at once

_POINT = (reports.c.step, reports.c.epoch, reports.c.key, reports.c.value)
_NAMED = reports.c.key.in_(bindparam("metrics", expanding=True)) & (reports.c.fold == 0)
_OWN = select(*_POINT).where(reports.c.trial_id == bindparam("trial"), _NAMED).order_by(reports.c.step)
_OWN_CLOSED = _OWN.where(reports.c.epoch.is_not(None))

_MANY = (
    select(reports.c.trial_id, *_POINT)
    .where(reports.c.trial_id.in_(bindparam("trials", expanding=True)), _NAMED)
    .order_by(reports.c.trial_id, reports.c.step)
)
_MANY_CLOSED = _MANY.where(reports.c.epoch.is_not(None))

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

# Revisions only grow and trials are only added, so equal counts and sums mean equal trials.
_block = trials.c.number // BLOCK
_SUMS = (
    select(_block, func.count(), func.sum(trials.c.revision))
    .where(
        trials.c.study_id == bindparam("study"),
        trials.c.number >= bindparam("first"),
        trials.c.number <= bindparam("last"),
    )
    .group_by(_block)
    .order_by(_block)
)

_BEHIND = select(trials.c.state).where(
    trials.c.study_id == bindparam("study"),
    trials.c.number >= bindparam("first"),
    trials.c.number < bindparam("number"),
    trials.c.state.in_(UNSETTLED),
    trials.c.epoch < bindparam("at_epoch"),
)

_STATES = (
    select(trials.c.id, trials.c.number, trials.c.state, trials.c.revision)
    .where(trials.c.study_id == bindparam("study"), trials.c.number.in_(bindparam("numbers", expanding=True)))
    .order_by(trials.c.number)
)


@dataclass(frozen=True)
class Judgement:
    """The end of a trial: its outcome, a value per objective and the excess over the bounds by constraint."""

    outcome: Outcome
    values: list[float] | None = None
    violations: list[float] | None = None


class Curves:
    """The curves of one study's objectives. They are kept in memory until their trials change.

    `curves` and `states`, by number, ascending, are as of the last `refresh`. With `bounded` the loss of a trial that
    breaks constraints, by the values reported so far, ranks behind those that break none (`pareto.beyond`).
    """

    def __init__(
        self,
        study_id: int,
        objectives: Sequence[Objective],
        constraints: Sequence[Constraint] = (),
        *,
        bounded: bool = False,
    ) -> None:
        self.study_id = study_id
        self.objectives, self.constraints = objectives, constraints
        self.metrics = [objective.metric for objective in objectives]
        self._signs = [-1.0 if objective.direction == "maximize" else 1.0 for objective in objectives]
        self._bounds = constraints if bounded else ()
        self._read_keys = list(dict.fromkeys([*self.metrics, *(bound.metric for bound in self._bounds)]))
        self._own, self._many = (_OWN, _MANY) if self._bounds else (_OWN_CLOSED, _MANY_CLOSED)
        self.curves: dict[int, Curve] = {}
        self.states: dict[int, str] = {}
        self._revisions: dict[int, int] = {}
        self._sums: dict[int, tuple[int, int]] = {}  # of the blocks whose trials have not changed since they were read
        self._rankings = Rankings(self.curves)
        self._gap = 0  # every trial below has ended, and never changes

    def of(self, connection: Connection, trial_id: int) -> Curve:
        """Returns (epoch, loss) of one trial, in order."""
        rows = connection.execute(self._own, {"trial": trial_id, "metrics": self._read_keys})
        return self._curve(rows)

    def _curve(self, rows: Iterable[Any]) -> Curve:
        if len(self._read_keys) == 1 and not self._bounds:  # each row is a point
            [sign] = self._signs
            return [(epoch, _signed(sign, value)) for _, epoch, _, value in rows]
        return [(epoch, beyond(loss, self._violation(newest))) for _, epoch, loss, newest in self._points(rows)]

    def _violation(self, held: Mapping[str, float]) -> float:
        """Returns the total excess of values over the bounds; a missing value has none."""
        known = [(bound, held[bound.metric]) for bound in self._bounds if bound.metric in held]
        return sum(max(0.0, bound.violation(value)) if math.isfinite(value) else math.inf for bound, value in known)

    def _points(self, rows: Iterable[Any]) -> Iterator[tuple[int, int, Any, Mapping[str, float]]]:
        """Yields (step, epoch, loss, newest values) of each epoch that has every objective.

        The rows are (step, epoch, key, value) in the order of steps.
        """
        newest: dict[str, float] = {}
        for step, rows_of_step in groupby(rows, itemgetter(0)):
            closed: dict[int, dict[str, float]] = {}
            for _, epoch, key, value in rows_of_step:
                newest[key] = math.nan if value is None else value
                if epoch is not None:
                    closed.setdefault(epoch, {})[key] = newest[key]
            for epoch, metrics in closed.items():
                if all(metric in metrics for metric in self.metrics):
                    yield step, epoch, self.loss(metrics), newest

    def loss(self, values: Mapping[str, float]) -> Any:
        """Returns the loss of the objectives' values, by metric."""
        return self.flipped([values[metric] for metric in self.metrics])

    def flipped(self, values: Sequence[float]) -> Any:
        """Returns values as a loss, or a loss's parts as values; NaN for non-finite ones."""
        signed = [_signed(sign, value) for sign, value in zip(self._signs, values, strict=True)]
        return tuple(signed) if len(signed) > 1 else signed[0]

    def refresh(self, connection: Connection, last: int | None, own: int | None = None) -> None:
        """Reads what has changed in the trials <= `last`, or in all.

        `own` is the trial whose report this transaction commits and may yet roll back: its data is never treated as
        known.
        """
        last = 2**31 - 1 if last is None else last
        if self._gap > last:
            return
        where = {"study": self.study_id, "first": self._gap - self._gap % BLOCK, "last": last}
        sums = {block: (count, total) for block, count, total in connection.execute(_SUMS, where)}
        changed = [block for block, summed in sums.items() if self._sums.get(block) != summed]
        numbers = [n for block in changed for n in range(block * BLOCK, block * BLOCK + sums[block][0])]
        for start in range(0, len(numbers), PAGE):
            self._read(connection, numbers[start : start + PAGE], own)
        self._sums.update((block, sums[block]) for block in changed)
        if own is not None:
            self._sums.pop(own // BLOCK, None)
        while self.states.get(self._gap) in TERMINAL_STATES:
            self._gap += 1

    def _read(self, connection: Connection, numbers: Sequence[int], own: int | None) -> None:
        rows = connection.execute(_STATES, {"study": self.study_id, "numbers": numbers}).all()
        new = [row for row in rows if self._revisions.get(row.number) != row.revision]
        curves: dict[int, Curve] = {row.id: [] for row in new}
        where = {"trials": list(curves), "metrics": self._read_keys}
        for trial_id, points in groupby(connection.execute(self._many, where), itemgetter(0)):
            curves[trial_id] = self._curve(row[1:] for row in points)
        for row in new:
            self._revisions[row.number] = -1 if row.number == own else row.revision
            self.states[row.number], self.curves[row.number] = row.state, curves[row.id]
            self._rankings.put(row.number)

    def behind(self, connection: Connection, epoch: int, number: int) -> list[str]:
        """Returns the states of the trials before `number` that have neither reached `epoch` nor ended."""
        where = {"study": self.study_id, "first": self._gap, "number": number, "at_epoch": epoch}
        if states := connection.execute(_BEHIND, where).scalars().all():
            return list(states)  # no curve has to be read
        self.refresh(connection, number - 1)
        known = ((self.states[n], self.curves[n]) for n in range(self._gap, number))
        return [state for state, curve in known if state in UNSETTLED and not (curve and curve[-1][0] >= epoch)]

    def upto(self, connection: Connection, last: int | None) -> dict[int, tuple[str, Curve]]:
        """Returns number -> (state, curve) of every trial <= `last`, or of all."""
        self.refresh(connection, last)
        known = self.curves.items()
        return {number: (self.states[number], curve) for number, curve in known if last is None or number <= last}

    def ranking(self, epoch: int, beyond: float, group: Group | None = None) -> Ranking:
        """Returns the ranking of the first losses within [epoch, beyond), of all or of a group, as of the last
        `refresh`."""
        return self._rankings.of(epoch, beyond, group)

    def order(self, epoch: int, beyond: float, group: Group | None = None) -> Sequence[int]:
        """Returns the trials ordered by these losses, the best first."""
        return self.ranking(epoch, beyond, group).order

    def judge(self, connection: Connection, trial_id: int, outcome: Outcome) -> Judgement:
        """Returns the judgement of a trial that is complete or pruned; a failed one has no score.

        All values are of one epoch: the last or, by `select` of the first objective, its best. Constraints apply to the
        values reported up to there. A trial with a non-finite value of either is infeasible, however it ended. A
        complete trial whose objective or constraint is missing has failed; one that breaks a constraint is infeasible.
        """
        rows = connection.execute(_OWN_CLOSED, {"trial": trial_id, "metrics": self.metrics})
        points = [(step, epoch, loss) for step, epoch, loss, _ in self._points(rows)]
        if not points:
            missing = outcome.kind == "complete"
            return Judgement(self._missing(connection, trial_id, outcome, self.metrics) if missing else outcome)
        step, _, loss = self._selected(points)
        values = [self.flipped([loss])] if len(self.metrics) == 1 else list(self.flipped(loss))
        if not all(map(math.isfinite, values)):
            odd = next(metric for metric, value in zip(self.metrics, values, strict=True) if not math.isfinite(value))
            return Judgement(_nonfinite(outcome, odd))
        return self._constrained(connection, trial_id, outcome, values, step)

    def _constrained(
        self, connection: Connection, trial_id: int, outcome: Outcome, values: list[float], step: int
    ) -> Judgement:
        if not self.constraints:
            return Judgement(outcome, values)
        newest = {
            constraint.metric: self._last(connection, trial_id, constraint.metric, step)
            for constraint in self.constraints
        }
        if unheard := [metric for metric, value in newest.items() if value is None]:
            missing = outcome.kind == "complete"
            return (
                Judgement(self._missing(connection, trial_id, outcome, unheard))
                if missing
                else Judgement(outcome, values)
            )
        finite = {metric: value for metric, value in newest.items() if value is not None and math.isfinite(value)}
        if odd := newest.keys() - finite.keys():
            return Judgement(_nonfinite(outcome, min(odd)), values)
        violations = [constraint.violation(finite[constraint.metric]) for constraint in self.constraints]
        broken = [constraint for constraint, beyond in zip(self.constraints, violations, strict=True) if beyond > 0]
        if broken:
            outcome = _ended(
                outcome,
                "infeasible",
                "; ".join(constraint.broken_by(finite[constraint.metric]) for constraint in broken) + ".",
            )
        return Judgement(outcome, values, violations)

    def _selected(self, points: Sequence[tuple[int, int, Any]]) -> tuple[int, int, Any]:
        """Returns the point at which a trial is judged."""
        finite = [point for point in points if all(map(math.isfinite, _parts(point[2])))]
        if self.objectives[0].select == "last" or not finite:
            return points[-1]
        return min(finite, key=lambda point: _parts(point[2])[0])

    def _last(self, connection: Connection, trial_id: int, metric: str, step: int) -> float | None:
        row = connection.execute(_LAST, {"trial": trial_id, "metric": metric, "at_step": step}).first()
        if row is None:
            return None
        return math.nan if row.value is None else row.value

    def _missing(self, connection: Connection, trial_id: int, outcome: Outcome, metrics: Sequence[str]) -> Outcome:
        """Returns the end of a complete trial that never reported these metrics, or never all at once."""
        reported = [key for (key,) in connection.execute(_KEYS, {"trial": trial_id})]
        metric = next((name for name in metrics if name not in reported), " with ".join(metrics))
        shown = [key for key in reported if not machine_dependent(key)]
        shown.sort(key=lambda key: key.startswith("train/"))
        return _ended(outcome, "user_error", unreported(metric, shown))


def unreported(metric: str, reported: Sequence[str]) -> str:
    """Returns a sentence about a metric that the study needs and that no epoch has reported together with
    `reported`."""
    error = f"no epoch has reported {metric!r}, by which the study judges"
    if metric in reported:
        return f"{error}: report it with epoch=, and of a step only once, since the first report of a step counts."
    error += f"{near(metric, reported) or '.'} Reported were {', '.join(reported) or 'nothing'}: "
    return f"{error}name one of them in the study, or report it with the others."


def _signed(sign: float, value: float | None) -> float:
    """Returns a value of an objective as a loss; an infinity becomes NaN, since it would win in one direction."""
    return sign * value if value is not None and math.isfinite(value) else math.nan


def _parts(loss: float | Losses) -> tuple[float, ...]:
    return loss if isinstance(loss, tuple) else (loss,)


def _ended(outcome: Outcome, kind: OutcomeKind, error: str) -> Outcome:
    """Returns the end of a complete trial with an `error`; a stopped one keeps its own."""
    return Outcome(kind, outcome.step, outcome.epoch, error=error) if outcome.kind == "complete" else outcome


def _nonfinite(outcome: Outcome, metric: str) -> Outcome:
    where = "at the end" if outcome.kind == "complete" else f"at step {outcome.step}, where the trial was stopped"
    return Outcome("nonfinite", outcome.step, outcome.epoch, error=f"{metric} is not finite {where}.")
