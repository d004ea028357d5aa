"""Gives a strategy what it may read: the objectives' curves, as losses (lower is better, NaN where a value is not
finite).

Only closed epochs of fold 0 count. A trial that has ended never changes, so its curve is read once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import bindparam, func, select
from sqlalchemy.engine import Connection

from hpo.ledger import statements as sql
from hpo.ledger.names import machine_dependent
from hpo.ledger.tables import reports, trials
from hpo.search.curves import Curve, Group, Rankings, first_loss, first_losses
from hpo.search.pareto import Losses, Ranking, beyond, ranked
from hpo.space.objective import Constraint, Objective
from hpo.space.trial_state import TERMINAL_STATES, UNSETTLED
from hpo.text import near
from trainer.report import Outcome, OutcomeKind

PAGE = 500  # trials read at once: SQLite takes 32766 parameters

BLOCK = 64  # trials that are asked at once whether any has changed

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

# Revisions only grow and trials only come, so equal counts and sums are equal trials.
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


class Unsettled(Exception):
    """Trials before the one that is decided have neither come to its epoch nor ended."""


@dataclass(frozen=True)
class Judgement:
    """How a trial ends: its outcome, a value per objective and, by constraint, how far it is beyond the bounds."""

    outcome: Outcome
    values: list[float] | None = None
    violations: list[float] | None = None


class Curves:
    """The curves of one study's objectives. What was read is kept in memory until its trial changes.

    `curves` and `states`, by number, ascending, are as of the last `refresh`. Under `bounded` the loss of a trial that
    breaks constraints, by what was reported of them so far, ranks behind those that break none (`pareto.beyond`).
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
        self._read_keys = list(dict.fromkeys([*self.metrics, *(one.metric for one in self._bounds)]))
        self._own, self._many = (_OWN, _MANY) if self._bounds else (_OWN_CLOSED, _MANY_CLOSED)
        self.curves: dict[int, Curve] = {}
        self.states: dict[int, str] = {}
        self._revisions: dict[int, int] = {}
        self._sums: dict[int, tuple[int, int]] = {}  # of the blocks whose trials are all as they were read
        self._rankings = Rankings(self.curves)
        self._gap = 0  # every trial below has ended, and never changes

    def of(self, connection: Connection, trial_id: int) -> Curve:
        """(epoch, loss) of one trial, in order."""
        rows = connection.execute(self._own, {"trial": trial_id, "metrics": self._read_keys})
        return self._curve(rows)

    def _curve(self, rows: Iterable[Any]) -> Curve:
        if len(self._read_keys) == 1 and not self._bounds:  # each row is a point
            [sign] = self._signs
            return [(epoch, _signed(sign, value)) for _, epoch, _, value in rows]
        return [(epoch, beyond(loss, self._violation(held))) for _, epoch, loss, held in self._points(rows)]

    def _violation(self, held: Mapping[str, float]) -> float:
        """How far values are beyond the bounds, in all; what is not known yet breaks none."""
        known = [(one, held[one.metric]) for one in self._bounds if one.metric in held]
        return sum(max(0.0, one.violation(value)) if math.isfinite(value) else math.inf for one, value in known)

    def _points(self, rows: Iterable[Any]) -> Iterator[tuple[int, int, Any, Mapping[str, float]]]:
        """(step, epoch, loss, newest values) where every objective was reported, of rows (step, epoch, key, value) in
        the order of steps."""
        held: dict[str, float] = {}
        for step, told in groupby(rows, itemgetter(0)):
            closed: dict[int, dict[str, float]] = {}
            for _, epoch, key, value in told:
                held[key] = math.nan if value is None else value
                if epoch is not None:
                    closed.setdefault(epoch, {})[key] = held[key]
            for epoch, own in closed.items():
                if all(metric in own for metric in self.metrics):
                    yield step, epoch, self.loss(own), held

    def loss(self, values: Mapping[str, float]) -> Any:
        """The loss of the objectives' values, by metric."""
        return self.flipped([values[metric] for metric in self.metrics])

    def flipped(self, values: Sequence[float]) -> Any:
        """Values as a loss, and a loss's parts as values; NaN for what is not finite."""
        signed = [_signed(sign, value) for sign, value in zip(self._signs, values, strict=True)]
        return tuple(signed) if len(signed) > 1 else signed[0]

    def refresh(self, connection: Connection, last: int | None, own: int | None = None) -> None:
        """Read what has changed of the trials <= `last`, or of all. `own` is the one whose report this transaction
        commits, which may come to nothing: what is read of it is never taken as known."""
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
        """The states of the trials before `number` that have neither come to `epoch` nor ended."""
        where = {"study": self.study_id, "first": self._gap, "number": number, "at_epoch": epoch}
        if found := connection.execute(_BEHIND, where).scalars().all():
            return list(found)  # no curve has to be read for that
        self.refresh(connection, number - 1)
        known = ((self.states[n], self.curves[n]) for n in range(self._gap, number))
        return [state for state, curve in known if state in UNSETTLED and not (curve and curve[-1][0] >= epoch)]

    def upto(self, connection: Connection, last: int | None) -> dict[int, tuple[str, Curve]]:
        """Number -> (state, curve) of every trial <= `last`, or of all, as of now."""
        self.refresh(connection, last)
        known = self.curves.items()
        return {number: (self.states[number], curve) for number, curve in known if last is None or number <= last}

    def ranking(self, epoch: int, beyond: float, group: Group | None = None) -> Ranking:
        """Of the first losses within [epoch, beyond), of all trials or of a group, as of the last `refresh`."""
        return self._rankings.of(epoch, beyond, group)

    def order(self, epoch: int, beyond: float, group: Group | None = None) -> Sequence[int]:
        """The trials by these losses, the best first."""
        return self.ranking(epoch, beyond, group).order

    def judge(self, connection: Connection, trial_id: int, outcome: Outcome) -> Judgement:
        """What a trial ends with that is complete or pruned; nothing that failed is scored.

        All values are of one epoch: the last, or by `select` of the first objective its best. Constraints are held
        against what was reported up to there. One of which either is not finite is infeasible, whoever ended it. A
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
            return Judgement(_nonfinite(outcome, min(odd)), values)
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
        shown.sort(key=lambda key: key.startswith("train/"))
        return _ended(outcome, "user_error", unreported(metric, shown))


def unreported(metric: str, reported: Sequence[str]) -> str:
    """A sentence on what the study judges by and no epoch has reported, or none of those that were `reported` with."""
    error = f"no epoch has reported {metric!r}, by which the study judges"
    if metric in reported:
        return f"{error}: report it with epoch=, and of a step only once, since the first report of a step counts."
    error += f"{near(metric, reported) or '.'} Reported were {', '.join(reported) or 'nothing'}: "
    return f"{error}name one of them in the study, or report it with the others."


def _signed(sign: float, value: float | None) -> float:
    """A value of an objective as a loss: were an infinity one, it would be ahead of every other in one direction."""
    return sign * value if value is not None and math.isfinite(value) else math.nan


def _parts(loss: float | Losses) -> tuple[float, ...]:
    return loss if isinstance(loss, tuple) else (loss,)


def _ended(outcome: Outcome, kind: OutcomeKind, error: str) -> Outcome:
    """How a complete trial has ended after all; what was stopped stays so."""
    return Outcome(kind, outcome.step, outcome.epoch, error=error) if outcome.kind == "complete" else outcome


def _nonfinite(outcome: Outcome, metric: str) -> Outcome:
    where = "at the end" if outcome.kind == "complete" else f"where it was stopped, at step {outcome.step}"
    return Outcome("nonfinite", outcome.step, outcome.epoch, error=f"{metric} is not finite {where}.")


class LedgerHistory:
    """A hpo.search.strategies.base.History inside the transaction of a report."""

    def __init__(
        self,
        curves: Curves,
        connection: Connection,
        trial_id: int,
        number: int,
        epoch: int,
        limit: int | None,
    ) -> None:
        self.number, self.epoch = number, epoch
        self._curves, self._connection = curves, connection
        self._trial_id, self._limit = trial_id, limit

    @property
    def curve(self) -> Curve:
        """The trial's own (epoch, loss), this epoch included."""
        return self._own

    @cached_property
    def _own(self) -> Curve:
        known = self._curves.of(self._connection, self._trial_id)
        return [point for point in known if point[0] <= self.epoch]

    @property
    def told(self) -> bool:
        """Whether the curve has this epoch: of what is reported twice at a step the first counts, and that may have
        closed none."""
        return bool(self.curve) and self.curve[-1][0] == self.epoch

    @property
    def value(self) -> Any:
        """The trial's own loss at this epoch."""
        return self.curve[-1][1]

    def at(self, epoch: int) -> dict[int, Any]:
        """Number -> loss of the others that closed `epoch`; raises Unsettled where ordered mode cannot tell yet."""
        if self._limit is None:
            losses = self._known.ranking(epoch, epoch + 1).losses
            return {number: loss for number, loss in losses.items() if number != self.number}
        if self.unsettled(epoch):
            raise Unsettled
        losses = self._curves.ranking(epoch, epoch + 1).losses
        return {number: loss for number, loss in losses.items() if number < self.number}

    def unsettled(self, epoch: int) -> list[str]:
        """The states of the trials before this one that have neither come to `epoch` nor ended."""
        return self._curves.behind(self._connection, epoch, self.number)

    def order(self, epoch: int, beyond: float, group: Group | None = None) -> Sequence[int]:
        """The visible trials (of a group) and this one by their first loss within [epoch, beyond), the best first."""
        if self._limit is None:
            found = self._known.order(epoch, beyond, group)
            early = first_loss(self.curve, epoch, beyond) is None  # what it reports later is not known here
            return [number for number in found if number != self.number] if early else found
        losses = self._known.ranking(epoch, beyond, group).losses
        seen = {number: loss for number, loss in losses.items() if self._sees(number)}
        return ranked(seen | first_losses({self.number: self.curve}, epoch, beyond))

    def curves(self, states: Collection[str] = ("complete",)) -> dict[int, Curve]:
        """Number -> curve of the other visible trials in one of `states`."""
        known, found = self._known.curves, self._known.states
        return {number: known[number] for number in known if found[number] in states and self._sees(number)}

    def checkpoint(self, number: int) -> str | None:
        """The newest kept checkpoint of another visible trial, as `<trial number>/<path>`."""
        if self._limit is not None and number > self._limit:
            return None
        where = {"study": self._curves.study_id, "trial": number}
        path = self._connection.execute(sql.NEWEST, where).scalar()
        return path and f"{number}/{path}"

    @cached_property
    def _known(self) -> Curves:
        """The curves as this transaction sees them."""
        self._curves.refresh(self._connection, self._limit, own=self.number)
        return self._curves

    def _sees(self, number: int) -> bool:
        return number != self.number and (self._limit is None or number <= self._limit)
