"""Proposes the user's configurations and draws around priors before a sampler's own proposals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpo.search.promotion.base import Featuring, Point
from hpo.search.samplers.base import Proposal, Sampler, TrialRecord

if TYPE_CHECKING:
    from hpo.space.space import Space


class InitialTrialsSampler:
    """Proposes the entries of `queue`, parameters by path, then `guided` random draws around the priors.

    `random` makes these draws and fills in parameters that an entry of the queue does not set. A sampler with a memory
    learns from both. If `sequence` is set, the sampler's proposals are the points of a sequence, and its first point
    follows them.
    """

    def __init__(
        self,
        sampler: Sampler,
        random: Sampler,
        space: Space,
        queue: Sequence[Mapping[str, Any]],
        guided: int,
        sequence: bool,
    ) -> None:
        self._sampler, self._random, self._space, self._queue = sampler, random, space, queue
        self._end = len(queue) + guided
        self._shift = self._end if sequence else 0

    def adopt(self, record: TrialRecord) -> None:
        self._sampler.adopt(record)

    def tell(self, record: TrialRecord) -> None:
        self._sampler.tell(record)

    def ask(self, number: int) -> Proposal:
        if number >= self._end:
            proposal = self._sampler.ask(number - self._shift)
            return replace(proposal, seed=self._random.ask(number).seed) if self._shift else proposal
        drawn = self._random.ask(number)
        coordinates = drawn.coordinates
        if number < len(self._queue):
            coordinates = self._space.encode(self._queue[number], coordinates)
        self._sampler.adopt(TrialRecord(number, "running", coordinates))
        return Proposal(coordinates, drawn.seed)

    def features(self) -> Mapping[int, Point]:
        return self._sampler.features() if isinstance(self._sampler, Featuring) else {}

    def exhausted(self, number: int) -> str:
        return self._sampler.exhausted(number - self._shift) if number >= self._end else ""
