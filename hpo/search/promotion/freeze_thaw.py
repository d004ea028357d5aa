"""Freeze-thaw: every trial pauses at its rungs, and a model promotes the most promising trials of a rung.

The strategy comes with its own sampler, since one model makes both choices: `promote` chooses waiting trials within
ASHA's quota, and where it promotes none, the sampler chooses a new configuration.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from hpo.errors import UserError
from hpo.search.curves import Curve
from hpo.search.promotion.asha import AshaPromote
from hpo.search.promotion.base import Point, RungView
from hpo.search.samplers.base import Proposal, TrialRecord, is_broken
from hpo.search.samplers.registry import Random
from hpo.search.strategies.base import History
from hpo.space.objective import Objective
from trainer.report import Verdict

if TYPE_CHECKING:
    from hpo.space.space import Space

_GOING = ("waiting", "running")
_EARLIER = -1_000_000  # the number of the first trial of another study; new configurations have -1, -2, ...
STARTUP = 8  # trials that have to be seen before the model is used
SHARE = 3  # one new trial in this many is drawn at random
_MODEL = "hpo.search.promotion.curve_model"
_ANYWHERE, _NEARBY = 192, 64  # configurations from which a new one is chosen
_BEST, _STEP = 8, 0.1  # a nearby one moves half of the dimensions of a best trial by this deviation in the cube


class FreezeThaw(AshaPromote):
    """Pauses every trial at each of its rungs, min_epochs * eta^k epochs, and promotes by a model of all curves.

    Of n trials that have reached a rung, floor(n / eta) continue, as under `asha-promote`: those with the greatest
    expected improvement, which are not always those with the least loss. Where no rung has room, a new trial begins,
    with the greatest expected improvement among the configurations that the sampler draws. So the quota decides whether
    a trial continues or a new one begins; the model ranks the trials of a rung, and the configurations, but does not
    compare trials with configurations.

    The improvement is predicted at the length of the longest complete trial, or before there is one at eta times the
    longest trial. It is measured against the model's (`hpo.search.promotion.curve_model`) prediction for the best trial
    there: every trial would improve on the best loss seen by training further, so the shortest segment would always win
    (docs/log.md).

    With fewer than eight trials seen, or no finite loss among them, it decides as `asha-promote` does. It also does so
    once no more trials are asked for, so that the study's best trial is trained in full.
    """

    brings: ClassVar[str] = "freeze-thaw"

    name: Literal["freeze-thaw"] = "freeze-thaw"  # pyright: ignore[reportIncompatibleVariableOverride]
    several: ClassVar[bool] = False
    rungs: ClassVar[bool] = False  # its model uses the losses themselves
    chooses: ClassVar[str] = "the model of curves lets the best go on"
    min_epochs: int = Field(default=4, ge=1)
    eta: int = Field(default=3, ge=2)

    def decide(self, history: History) -> Verdict:
        return self.wait(history)

    def promote(self, board: RungView, last: bool) -> Sequence[int]:
        waiting = [number for number in sorted(board.waiting) if number in board.points]
        if last or len(board.curves.keys() & board.points.keys()) < STARTUP:
            return super().promote(board, last)
        room = self._room(board)
        if not any(room.get(self._reached(board, number), 0) > 0 for number in waiting):
            return []
        worth = improvement(board, {number: board.points[number] for number in waiting}, self.eta)
        if not worth:
            return super().promote(board, last)
        promoted: list[int] = []
        for rung in sorted(room, reverse=True):
            here = [number for number in waiting if self._reached(board, number) == rung]
            promoted += sorted(here, key=lambda number: (-worth[number], number))[: max(room[rung], 0)]
        return promoted

    def _reached(self, board: RungView, number: int) -> int:
        """Returns the last rung that a trial has reached, -1 before the first or from `max_epochs` on."""
        curve = board.curves.get(number)
        rung = self.rung(curve[-1][0]) if curve else None
        return -1 if rung is None else rung

    def _room(self, board: RungView) -> dict[int, int]:
        """Returns the number of trials that each rung may still promote."""
        arrived: Counter[int] = Counter()
        passed: Counter[int] = Counter()
        ends = Counter((curve[-1][0], board.states[number]) for number, curve in board.curves.items() if curve)
        for (epoch, state), count in ends.items():
            reached = self.rung(epoch)
            for rung in range(0 if reached is None else reached + 1):
                arrived[rung] += count
                passed[rung] += count * (rung != reached or state in (*_GOING, "complete"))
        return {rung: arrived[rung] // self.eta - passed[rung] for rung in range(max(arrived, default=-1) + 1)}


def improvement(board: RungView, points: Mapping[int, Point], eta: int = 3) -> dict[int, float]:
    """Returns the expected improvement of the trials with these features, by number.

    A number that no trial has stands for a new trial. The result is empty if no ended or waiting trial has a finite
    loss, since a model needs one.
    """
    from hpo.search.promotion.curve_model import Model, observe

    known = {n: curve for n, curve in board.curves.items() if board.states[n] != "failed"}
    growing = {n for n in known if board.states[n] in _GOING}
    numbers, trials = observe(board.points, known, growing, board.by_best)
    if not numbers:
        return {}
    whole = [curve[-1][0] for n, curve in board.curves.items() if curve and board.states[n] == "complete"]
    epoch = max(whole) if whole else eta * max(curve[-1][0] for curve in board.curves.values() if curve)
    index_of = {number: index for index, number in enumerate(numbers)}
    gains = Model.of(trials).improvement(list(points.values()), [index_of.get(n, -1) for n in points], epoch)
    return dict(zip(points, gains, strict=True))


def _rounded(point: Point) -> Point:
    """Rounds by more than the error of a value's conversion to the unit cube and back."""
    return tuple(round(x, 9) for x in point)


class FreezeThawSampler:
    """Chooses among random configurations, and some near the best trials, the greatest expected improvement.

    Every third trial is drawn at random, since the model may be wrong where it has seen nothing (as in BOHB and SMAC,
    Falkner et al. 2018; Hutter et al. 2011).

    The feature of a dimension is its point in the unit interval, or 0.5 if it is not active; a choice has a feature for
    each option. Failed trials do not enter the model. Infeasible ones enter it with the worst loss, plus the amount by
    which they break constraints. A trial without a curve has one point.

    Raises UserError for several objectives.
    """

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int) -> None:
        if len(objectives) != 1:
            raise UserError(
                f"sampler 'freeze-thaw' takes one objective and the study has {len(objectives)}: choose tpe; with the "
                "strategy of that name, choose asha-promote."
            )
        self._space, self._seed = space, seed
        self._sign = -1.0 if objectives[0].direction == "maximize" else 1.0
        self._by_best = objectives[0].select == "best"
        self._random = Random(space, objectives, seed)
        self._conditional = any(dimension.conditions for dimension in space.dimensions.values())
        known = space.coordinates.values()
        self._plain = not self._conditional and all(seen[0] == "float" and seen[-1] is None for seen in known)
        self._records: dict[int, TrialRecord] = {}
        self._points: dict[int, Point] = {}
        self._curves: dict[int, list[tuple[int, float]]] = {}
        self._told = False

    def adopt(self, record: TrialRecord) -> None:
        self._take(record)

    def tell(self, record: TrialRecord) -> None:
        if not self._told:  # importing the model, and torch, takes seconds, which workers would wait at the first ask
            import_module("concurrent.futures.thread")  # for torch; no thread can import it as the process ends
            threading.Thread(target=import_module, args=(_MODEL,), name="import of the model").start()
        self._told = True
        self._take(record)

    def warm(self, records: Sequence[TrialRecord]) -> None:
        """Adds trials of another study to the model, each with every coordinate; it learns from their curves."""
        for index, record in enumerate(records):
            self._take(replace(record, number=_EARLIER - index))

    def _take(self, record: TrialRecord) -> None:
        self._records[record.number] = record
        self._points[record.number] = self._point(record.coordinates)
        curve = record.curve
        if not curve and record.state in ("complete", "infeasible"):
            curve = [(1, value if value is not None else math.nan) for value in record.values or (None,)]
        self._curves[record.number] = [(epoch, self._sign * value) for epoch, value in curve]

    def exhausted(self, number: int) -> str:
        return ""

    def features(self) -> Mapping[int, Point]:
        return {number: point for number, point in self._points.items() if number > _EARLIER}

    def ask(self, number: int) -> Proposal:
        proposal = self._random.ask(number)
        curves, states = self._losses(), {n: record.state for n, record in self._records.items()}
        seen = [n for n, curve in curves.items() if states[n] != "failed" and any(math.isfinite(x) for _, x in curve)]
        known = sum(states[n] not in _GOING for n in seen)
        if known >= STARTUP and len(self._space) and number % SHARE:
            best = sorted(seen, key=lambda n: (self._level(curves[n]), n))[:_BEST]
            candidates = self._candidates(proposal.seed, best)
            points = self._untried({-1 - k: self._point_at(candidate) for k, candidate in enumerate(candidates)})
            worth = improvement(RungView(curves, states, self._points, by_best=self._by_best), points)
            chosen = max(worth, key=lambda k: (worth[k], k))
            proposal = Proposal(self._space.from_unit(candidates[-1 - chosen]), proposal.seed)
        self._take(TrialRecord(number, "running", proposal.coordinates))
        return proposal

    def _untried(self, points: dict[int, Point]) -> dict[int, Point]:
        """Returns the points that no trial has, or all points if none is left.

        A nearby point may be a trial's own, and repeating trials is the task of `confirm`.
        """
        tried = {_rounded(point) for point in self._points.values()}
        return {k: point for k, point in points.items() if _rounded(point) not in tried} or points

    def _level(self, curve: Curve) -> float:
        """Returns the loss that judges a trial so far."""
        losses = [loss for _, loss in curve if math.isfinite(loss)]
        return min(losses) if self._by_best else losses[-1]

    def _is_unfit(self, record: TrialRecord) -> bool:
        return record.state == "infeasible" and math.isfinite(self._curves[record.number][-1][1])

    def _losses(self) -> dict[int, list[tuple[int, float]]]:
        """Returns the curves; an infeasible trial has a single point, above every other loss by its violations.

        That point is at the last epoch of all trials, since a bad loss at an early epoch, where most trials diverge,
        says nothing about the last one. A curve that ends on a loss that is not finite stays as it is.
        """
        observed = (record for record in self._records.values() if self._curves[record.number])
        broken = {record.number: record for record in observed if is_broken(record) or self._is_unfit(record)}
        kept = (loss for n, curve in self._curves.items() if n not in broken for _, loss in curve)
        worst = max((loss for loss in kept if math.isfinite(loss)), default=0.0)
        behind = {n: worst + sum(max(by, 0.0) for by in record.violations) for n, record in broken.items()}
        last = max((curve[-1][0] for curve in self._curves.values() if curve), default=1)
        return self._curves | {n: [(last, loss)] for n, loss in behind.items()}

    def _point(self, coordinates: Mapping[str, Any]) -> Point:
        dimensions, active = self._space.dimensions, coordinates
        features: list[float] = []
        if self._conditional and len(coordinates) == len(dimensions):
            active = self._space.decode(coordinates)
        for path, seen in self._space.coordinates.items():
            is_active = path in active and path in coordinates
            if seen[0] == "choice":
                features += [math.sqrt(0.5) if is_active and coordinates[path] == k else 0.0 for k in range(seen[1])]
            else:
                features.append(dimensions[path].to_unit(coordinates[path]) if is_active else 0.5)
        return tuple(features)

    def _point_at(self, point: Sequence[float]) -> Point:
        """Returns the features at a point of the unit cube."""
        return tuple(point) if self._plain else self._point(self._space.from_unit(point))

    def _candidates(self, seed: int, best: Sequence[int]) -> list[list[float]]:
        """Returns points of the unit cube from which a new trial is chosen: some random, some near the best trials."""
        from numpy import array, where
        from numpy.random import default_rng

        draws, space = default_rng(seed), self._space
        candidates = draws.random((_ANYWHERE, len(space))).tolist()
        if space.has_priors:
            candidates = [self._cube_point(space.guided(u)) for u in candidates]
        around = array([self._cube_point(self._records[best[k % len(best)]].coordinates) for k in range(_NEARBY)])
        moved, anew = draws.random((2, *around.shape))
        near = (around + draws.normal(0.0, _STEP, around.shape)).clip(0.0, 1.0)
        return candidates + where(moved < 0.05, anew, where(moved < 0.5, near, around)).tolist()

    def _cube_point(self, coordinates: Mapping[str, Any]) -> list[float]:
        """Returns the point of coordinates in the unit cube; a missing coordinate becomes 0.5."""
        dimensions = self._space.dimensions
        return [dimensions[p].to_unit(coordinates[p]) if p in coordinates else 0.5 for p in self._space.paths]
