"""Freeze-thaw: every trial waits at its rungs, and the most promising of a rung go on.

The strategy brings a sampler of its own, since one model makes both choices: `promote` says which trials go on that
wait, as many as ASHA's quota lets, and where there is none the sampler which configuration begins.
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
from hpo.search.promotion.asha import AshaPromote
from hpo.search.promotion.base import Point, RungView
from hpo.search.samplers.base import Proposal, TrialRecord, is_broken
from hpo.search.samplers.registry import Random
from hpo.search.strategies.base import Curve, History
from hpo.space.objective import Objective
from trainer.report import CONTINUE, Verdict

if TYPE_CHECKING:
    from hpo.space.space import Space

_GOING = ("waiting", "running")
_EARLIER = -1_000_000  # the number of the first trial of another study; new configurations have -1, -2, ...
STARTUP = 8  # trials that have been seen before the model is asked
SHARE = 3  # one new trial of so many is drawn at random
_MODEL = "hpo.search.promotion.curve_model"
_ANYWHERE, _NEARBY = 192, 64  # configurations from which a new one is chosen
_BEST, _STEP = 8, 0.1  # those near these trials differ from them in half of the dimensions, by so much of the cube


class FreezeThaw(AshaPromote):
    """Every trial waits at each of its rungs, min_epochs * eta^k epochs; a model of all curves says which goes on.

    Of n trials that have come to a rung floor(n / eta) go on, as under `asha-promote`: those of the greatest expected
    improvement, which are not always those with the least loss there. Where no rung has room a new trial begins, of the
    configurations that the sampler draws the one with the greatest. So whether one goes on or a new one begins is the
    quota's to say; the model ranks those of one rung, and configurations, but never the ones against the others.

    The improvement is expected at the length of the longest complete trial, or while there is none at eta times the
    longest, on what the model (`hpo.search.promotion.curve_model`) expects of the best trial there. Were it held
    against the best loss seen, all would improve on it by training on, and the shortest stretch would always win
    (docs/log.md).

    With fewer than eight trials seen or no finite loss among them it does as `asha-promote` does; and so it does once
    no more trials come, so that a study ends with its winner trained in full.
    """

    name: Literal["freeze-thaw"] = "freeze-thaw"  # pyright: ignore[reportIncompatibleVariableOverride]
    several: ClassVar[bool] = False
    rungs: ClassVar[bool] = False  # its model is of the losses as they are
    min_epochs: int = Field(default=4, ge=1)
    eta: int = Field(default=3, ge=2)

    def decide(self, history: History) -> Verdict:
        epoch, curve = history.epoch, history.curve
        rung = self.rung(epoch)
        if rung is None or (len(curve) > 1 and self.rung(curve[-2][0]) == rung):
            return CONTINUE
        if math.isnan(history.value):
            return Verdict("stop", reason=f"the objective is not finite at rung {rung} (epoch {epoch})")
        return Verdict("pause", reason=f"waits at rung {rung} (epoch {epoch}); the model of curves lets the best go on")

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
        found: list[int] = []
        for rung in sorted(room, reverse=True):
            here = [number for number in waiting if self._reached(board, number) == rung]
            found += sorted(here, key=lambda number: (-worth[number], number))[: max(room[rung], 0)]
        return found

    def _reached(self, board: RungView, number: int) -> int:
        """The rung that a trial has come to; -1 before the first. From `max_epochs` on none is ahead of it."""
        curve = board.curves.get(number)
        rung = self.rung(curve[-1][0]) if curve else None
        return -1 if rung is None else rung

    def _room(self, board: RungView) -> dict[int, int]:
        """How many more may go on from each rung."""
        come: Counter[int] = Counter()
        gone: Counter[int] = Counter()
        ends = Counter((curve[-1][0], board.states[number]) for number, curve in board.curves.items() if curve)
        for (epoch, state), count in ends.items():
            reached = self.rung(epoch)
            for rung in range(0 if reached is None else reached + 1):
                come[rung] += count
                gone[rung] += count * (rung != reached or state in (*_GOING, "complete"))
        return {rung: come[rung] // self.eta - gone[rung] for rung in range(max(come, default=-1) + 1)}


def improvement(board: RungView, points: Mapping[int, Point], eta: int = 3) -> dict[int, float]:
    """The expected improvement of the trials with these features, by number; a number of no trial is a new one. Empty
    where no trial that has ended or waits has a finite loss, and so nothing to make a model of."""
    from hpo.search.promotion.curve_model import Model, observe

    known = {n: curve for n, curve in board.curves.items() if board.states[n] != "failed"}
    growing = {n for n in known if board.states[n] in _GOING}
    numbers, trials = observe(board.points, known, growing, board.by_best)
    if not numbers:
        return {}
    whole = [curve[-1][0] for n, curve in board.curves.items() if curve and board.states[n] == "complete"]
    epoch = max(whole) if whole else eta * max(curve[-1][0] for curve in board.curves.values() if curve)
    place = {number: index for index, number in enumerate(numbers)}
    found = Model.of(trials).improvement(list(points.values()), [place.get(n, -1) for n in points], epoch)
    return dict(zip(points, found, strict=True))


def _rounded(point: Point) -> Point:
    """Beyond what a value loses on its way through the unit cube."""
    return tuple(round(x, 9) for x in point)


class FreezeThawSampler:
    """Of random configurations, and some near the best trials, the one with the greatest expected improvement.

    Every third trial is drawn at random whatever the model says: it may be wrong where it has seen nothing (as BOHB and
    SMAC do, Falkner et al. 2018; Hutter et al. 2011).

    A dimension is a feature, its place in the unit interval, or the middle where it is not active; a choice is one for
    each option. Trials that fail do not enter the model; infeasible ones do as the worst, or behind it by how far
    they break constraints. A trial without a curve has one point.

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
        if not self._told:  # its import, of torch, takes seconds for which the first ask would have workers wait
            import_module("concurrent.futures.thread")  # torch's need, which no thread can import as the process ends
            threading.Thread(target=import_module, args=(_MODEL,), name="import of the model").start()
        self._told = True
        self._take(record)

    def warm(self, records: Sequence[TrialRecord]) -> None:
        """Have trials of another study in the model, each with every coordinate; it learns from their curves."""
        for place, record in enumerate(records):
            self._take(replace(record, number=_EARLIER - place))

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
            places = self._places_for(proposal.seed, best)
            points = self._untried({-1 - k: self._point_at(place) for k, place in enumerate(places)})
            worth = improvement(RungView(curves, states, self._points, by_best=self._by_best), points)
            chosen = max(worth, key=lambda k: (worth[k], k))
            proposal = Proposal(self._space.from_unit(places[-1 - chosen]), proposal.seed)
        self._take(TrialRecord(number, "running", proposal.coordinates))
        return proposal

    def _untried(self, points: dict[int, Point]) -> dict[int, Point]:
        """Those at which no trial stands: a place near a trial may be its own, and another run of it is for `confirm`.
        All of them where none is left."""
        tried = {_rounded(point) for point in self._points.values()}
        return {k: point for k, point in points.items() if _rounded(point) not in tried} or points

    def _level(self, curve: Curve) -> float:
        """What a trial is judged by so far."""
        losses = [loss for _, loss in curve if math.isfinite(loss)]
        return min(losses) if self._by_best else losses[-1]

    def _is_unfit(self, record: TrialRecord) -> bool:
        return record.state == "infeasible" and math.isfinite(self._curves[record.number][-1][1])

    def _losses(self) -> dict[int, list[tuple[int, float]]]:
        """The curves; of an infeasible trial an end, beyond every other loss by its violations.

        It stands at the longest epoch of all: at an early one, where most diverge, a bad loss says nothing of the last.
        A curve that ends on a loss that is not finite says so itself.
        """
        curved = (one for one in self._records.values() if self._curves[one.number])
        broken = {one.number: one for one in curved if is_broken(one) or self._is_unfit(one)}
        kept = (loss for n, curve in self._curves.items() if n not in broken for _, loss in curve)
        worst = max((loss for loss in kept if math.isfinite(loss)), default=0.0)
        behind = {n: worst + sum(max(by, 0.0) for by in one.violations) for n, one in broken.items()}
        last = max((curve[-1][0] for curve in self._curves.values() if curve), default=1)
        return self._curves | {n: [(last, loss)] for n, loss in behind.items()}

    def _point(self, coordinates: Mapping[str, Any]) -> Point:
        dimensions, active = self._space.dimensions, coordinates
        found: list[float] = []
        if self._conditional and len(coordinates) == len(dimensions):
            active = self._space.decode(coordinates)
        for path, seen in self._space.coordinates.items():
            there = path in active and path in coordinates
            if seen[0] == "choice":
                found += [math.sqrt(0.5) if there and coordinates[path] == k else 0.0 for k in range(seen[1])]
            else:
                found.append(dimensions[path].to_unit(coordinates[path]) if there else 0.5)
        return tuple(found)

    def _point_at(self, place: Sequence[float]) -> Point:
        """The features at a place of the unit cube."""
        return tuple(place) if self._plain else self._point(self._space.from_unit(place))

    def _places_for(self, seed: int, best: Sequence[int]) -> list[list[float]]:
        """Places of the unit cube from which a new trial is chosen: some drawn anywhere, some near the best trials."""
        from numpy import array, where
        from numpy.random import default_rng

        draws, space = default_rng(seed), self._space
        found = draws.random((_ANYWHERE, len(space))).tolist()
        if space.has_priors:
            found = [self._place(space.guided(u)) for u in found]
        around = array([self._place(self._records[best[k % len(best)]].coordinates) for k in range(_NEARBY)])
        moved, anew = draws.random((2, *around.shape))
        near = (around + draws.normal(0.0, _STEP, around.shape)).clip(0.0, 1.0)
        return found + where(moved < 0.05, anew, where(moved < 0.5, near, around)).tolist()

    def _place(self, coordinates: Mapping[str, Any]) -> list[float]:
        """Where coordinates lie in the unit cube; in its middle where a trial lacks one."""
        dimensions = self._space.dimensions
        return [dimensions[p].to_unit(coordinates[p]) if p in coordinates else 0.5 for p in self._space.paths]
