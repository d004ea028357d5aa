"""Wraps the sampler of a space with few configurations, so that none is proposed twice while there are others."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, Any

from hpo.search.promotion.base import Featuring, Point
from hpo.search.samplers.base import Proposal, Sampler, TrialRecord, ask_seed
from hpo.space.dimensions import Choice

if TYPE_CHECKING:
    from hpo.space.space import Space

FEW = 4096  # configurations, conditional dimensions counted in full


def is_few(space: Space) -> bool:
    """Whether the configurations can be counted and are not more than `FEW`."""
    return 1 < math.prod(dimension.count for dimension in space.dimensions.values()) <= FEW


def distance(space: Space, at: Mapping[str, Any], to: Mapping[str, Any]) -> float:
    """How far coordinates are from others, in the dimensions that are active there: the sum of the differences in the
    unit cube, a choice by 1."""
    active = space.decode(to)
    return sum(
        float(at[path] != to[path])
        if isinstance(dimension, Choice)
        else abs(dimension.to_unit(at[path]) - dimension.to_unit(to[path]))
        for path, dimension in space.dimensions.items()
        if path in active
    )


class DeduplicatingSampler:
    """Where `sampler` proposes what a trial before had, the nearest configuration that none had takes its place.

    Near is what differs least in the unit cube, a choice by 1; of equally near ones a draw decides, by number. Once all
    have been tried it is exhausted, and proposals are the sampler's own; the first `enqueued` ones, the user's, stay in
    any case.
    """

    def __init__(self, sampler: Sampler, space: Space, seed: int, enqueued: int) -> None:
        self._sampler, self._space, self._seed, self._enqueued = sampler, space, seed, enqueued
        self._tried: dict[int, str] = {}

    def adopt(self, record: TrialRecord) -> None:
        self._note(record)
        self._sampler.adopt(record)

    def tell(self, record: TrialRecord) -> None:
        self._note(record)
        self._sampler.tell(record)

    def _note(self, record: TrialRecord) -> None:
        if record.untried:
            self._tried.pop(record.number, None)
        elif len(record.coordinates) == len(self._space):  # else it is older than a change of the space
            self._tried[record.number] = self._key(record.coordinates)

    def _key(self, coordinates: Mapping[str, Any]) -> str:
        return json.dumps(self._space.decode(coordinates), sort_keys=True)

    @cached_property
    def _all(self) -> dict[str, dict[str, Any]]:
        """Every configuration's coordinates; a grid of so many points has each value of a dimension that is counted."""
        grid = (self._space.grid(number, FEW) for number in range(self._space.grid_size(FEW)))
        return {self._key(coordinates): coordinates for coordinates in grid}

    def ask(self, number: int) -> Proposal:
        proposal = self._sampler.ask(number)
        key = self._key(proposal.coordinates)
        if number >= self._enqueued and key in self._tried.values() and (left := self._left()):
            proposal = replace(proposal, coordinates=self._nearest(proposal.coordinates, left, number), draw=1)
            kept = proposal.trial_attrs, proposal.study_attrs
            self._sampler.adopt(TrialRecord(number, "running", proposal.coordinates, None, (), *kept))
            key = self._key(proposal.coordinates)
        self._tried[number] = key
        return proposal

    def _left(self) -> list[dict[str, Any]]:
        """What has not been tried, in the order of the grid."""
        tried = set(self._tried.values())
        return [at for key, at in self._all.items() if key not in tried]

    def _nearest(self, to: Mapping[str, Any], left: list[dict[str, Any]], number: int) -> dict[str, Any]:
        far = [round(distance(self._space, at, to), 9) for at in left]
        least = min(far)
        nearest = [at for at, by in zip(left, far, strict=True) if by == least]
        return Random(ask_seed(self._seed, number, 1)).choice(nearest)

    def features(self) -> Mapping[int, Point]:
        return self._sampler.features() if isinstance(self._sampler, Featuring) else {}

    def exhausted(self, number: int) -> str:
        size = self._space.grid_size(FEW)
        if number < self._enqueued or len(self._tried) < size or self._left():
            return self._sampler.exhausted(number)
        return f"the space has {size} configurations, and each has been tried"
