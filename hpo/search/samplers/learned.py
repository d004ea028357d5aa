"""Adds proposals from earlier studies before and between a sampler's own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hpo.search.knowledge import Knowledge, Observed, Teachers
from hpo.search.promotion.base import Featuring, Point
from hpo.search.samplers.base import ORIGIN, Proposal, Sampler, TrialRecord, ask_seed, is_open
from hpo.space.objective import Objective

if TYPE_CHECKING:
    from hpo.space.space import Space

STARTUP, SHARE = 8, 3  # trials told before a model is trusted; from then on one in SHARE is random
PLACES = (0, 1, 6, 7)  # of the portfolio: half of it comes before anything tells what the earlier studies are worth
COMPARED = 2  # trials that have been told before a density is drawn from
OFTEN = 0.5  # the probability with which a random proposal is drawn near good values, if the studies are worth it
_DRAW = -1  # the number of the draw in the seeds of a density


class LearnedSampler:
    """Proposes the portfolio at PLACES after the first `enqueued` proposals, which are the user's.

    Of the random proposals (those before the model has seen STARTUP trials and each SHARE-th later), half are drawn
    near the good values of an earlier study. A study is drawn in proportion to its worth, and seldom if no study is
    worth much. If none is worth anything, the sampler continues as if nothing had been learned: it sees as many random
    trials as it would have, since a model learns little from first trials chosen by a misleading study. `random` draws
    the dimensions that the earlier study has not searched. Everything is a function of the knowledge, the tells so far
    and the study's seed.
    """

    def __init__(
        self,
        sampler: Sampler,
        random: Sampler,
        space: Space,
        objectives: Sequence[Objective],
        seed: int,
        enqueued: int,
        knowledge: Knowledge,
    ) -> None:
        self._sampler, self._random, self._space, self._seed = sampler, random, space, seed
        self._signs = [-1.0 if objective.direction == "maximize" else 1.0 for objective in objectives]
        self._enqueued, self._portfolio = enqueued, knowledge["portfolio"]
        self._teachers = Teachers(space, knowledge)
        self._told: dict[int, Observed] = {}
        self._seen: tuple[tuple[int, int], ...] | None = None
        self._known: list[float] = []  # what the earlier studies are worth by the trials in `_seen`

    def adopt(self, record: TrialRecord) -> None:
        self._sampler.adopt(record)

    def tell(self, record: TrialRecord) -> None:
        self._sampler.tell(record)
        if not is_open(record) and (curve := self._curve(record)) and len(record.coordinates) == len(self._space):
            self._told[record.number] = Observed(self._point(record.coordinates), curve)

    def _curve(self, record: TrialRecord) -> list[tuple[int, float]]:
        """Returns a trial's losses by epoch; with several objectives, or without a curve, its mean value."""
        if len(self._signs) == 1 and record.curve:
            curve = [(epoch, self._signs[0] * value) for epoch, value in record.curve]
        elif record.values and None not in record.values:
            values = zip(self._signs, record.values, strict=True)
            curve = [(1, math.fsum(sign * (value or 0.0) for sign, value in values))]
        else:
            return []
        return curve if any(math.isfinite(loss) for _, loss in curve) else []

    def _point(self, coordinates: Mapping[str, Any]) -> dict[str, float]:
        active = self._space.decode(coordinates)
        return {path: self._space.dimensions[path].to_unit(coordinates[path]) for path in active}

    def ask(self, number: int) -> Proposal:
        index = number - self._enqueued
        if index < 0:
            return self._sampler.ask(number)
        worths = self._worths()
        if not any(worths):
            if len(self._told) >= STARTUP + min(len(self._portfolio), len(PLACES)):
                return self._sampler.ask(number)
            return self._proposed(number, self._random.ask(number).coordinates, "random")
        if index in PLACES[: len(self._portfolio)]:
            entry = self._portfolio[PLACES.index(index)]
            coordinates = self._space.encode(entry["params"], self._random.ask(number).coordinates, strict=False)
            return self._proposed(number, coordinates, f"portfolio of {entry['study']}")
        drawn = self._drawn(number, worths)
        return self._sampler.ask(number) if drawn is None else self._proposed(number, *drawn)

    def _proposed(self, number: int, coordinates: dict[str, Any], origin: str) -> Proposal:
        attributes = {ORIGIN: origin}
        self._sampler.adopt(TrialRecord(number, "running", coordinates, trial_attrs=attributes))
        return Proposal(coordinates, self._random.ask(number).seed, trial_attrs=attributes)

    def _drawn(self, number: int, worths: Sequence[float]) -> tuple[dict[str, Any], str] | None:
        """Returns coordinates near good ones and their study; None if it is the turn of the sampler's own proposal."""
        if len(self._told) < COMPARED or (len(self._told) >= STARTUP and number % SHARE):
            return None
        from numpy.random import default_rng

        rng = default_rng(ask_seed(self._seed, number, _DRAW))
        if rng.random() >= OFTEN * min(1.0, 2.0 * max(worths)):
            return None
        sums, uniform = list(accumulate(worths)), rng.random()
        teacher = self._teachers.studies[next(k for k, total in enumerate(sums) if uniform * sums[-1] < total)]
        count = len(teacher.paths)
        near = teacher.draw(rng.random(1 + count).tolist(), rng.normal(size=count).tolist(), rng.random(count).tolist())
        rest = self._random.ask(number).coordinates
        drawn = {path: self._space.dimensions[path].from_unit(u) for path, u in near.items()}
        return {**rest, **drawn}, f"density of {teacher.name}"

    def _worths(self) -> list[float]:
        """Returns the worths of the earlier studies given the trials told, in the order of their numbers."""
        first = {number: self._told[number] for number in sorted(self._told)[: Teachers.FIRST_TRIALS]}
        seen = tuple((number, len(trial.curve)) for number, trial in first.items())
        if seen != self._seen:
            self._seen, self._known = seen, self._teachers.worths(first)
        return self._known

    def features(self) -> Mapping[int, Point]:
        return self._sampler.features() if isinstance(self._sampler, Featuring) else {}

    def exhausted(self, number: int) -> str:
        return self._sampler.exhausted(number)
