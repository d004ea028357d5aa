"""Wraps samplers so that a configuration is not proposed twice while others remain: in a space with few configurations
none that was tried, and none from the study of a warm start."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, Any

from hpo.search.promotion.base import Featuring, Point
from hpo.search.samplers.base import Proposal, Sampler, TrialRecord, ask_seed
from hpo.space.dimensions import Choice

if TYPE_CHECKING:
    from hpo.space.space import Space

DRAWS = 100  # per trial, before a known configuration is tried again
ALIKE = 1e-6  # relative difference of values: samplers round their proposals to 8 significant digits
FEW = 4096  # configurations, with conditional dimensions counted in full


def is_few(space: Space) -> bool:
    """Returns whether the configurations are countable and at most `FEW`."""
    return 1 < math.prod(dimension.count for dimension in space.dimensions.values()) <= FEW


def distance(space: Space, at: Mapping[str, Any], to: Mapping[str, Any]) -> float:
    """Returns the distance between coordinates over the dimensions that are active at `to`.

    It is the sum of the differences in the unit cube; choices that differ add 1.
    """
    active = space.decode(to)
    return sum(
        float(at[path] != to[path])
        if isinstance(dimension, Choice)
        else abs(dimension.to_unit(at[path]) - dimension.to_unit(to[path]))
        for path, dimension in space.dimensions.items()
        if path in active
    )


def configuration(space: Space, coordinates: Mapping[str, Any]) -> str:
    """Returns the parameters at `coordinates` as text, which is equal for equal configurations."""
    return json.dumps(space.decode(coordinates), sort_keys=True)


def is_alike(params: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Returns whether two configurations are equal up to the rounding of proposals."""
    return params.keys() == others.keys() and all(
        math.isclose(value, others[path], rel_tol=ALIKE) if isinstance(value, float) else value == others[path]
        for path, value in params.items()
    )


class UnknownSampler:
    """Redraws at random if `sampler` proposes a configuration that trials of another study, `known`, have tried.

    A sampler that draws its first trials at random would otherwise repeat those of the earlier study, since the seeds
    are the same. The first `enqueued` proposals, the user's, always stay, and so does a proposal for which no new
    configuration was drawn.
    """

    def __init__(self, sampler: Sampler, space: Space, seed: int, enqueued: int, known: Sequence[TrialRecord]) -> None:
        self._sampler, self._space, self._seed, self._enqueued = sampler, space, seed, enqueued
        self._known = [space.decode(record.coordinates) for record in known]

    def adopt(self, record: TrialRecord) -> None:
        self._sampler.adopt(record)

    def tell(self, record: TrialRecord) -> None:
        self._sampler.tell(record)

    def ask(self, number: int) -> Proposal:
        proposal = self._sampler.ask(number)
        if number < self._enqueued or not self._is_known(proposal.coordinates):
            return proposal
        for draw in range(1, DRAWS + 1):
            random = Random(ask_seed(self._seed, number, draw))
            coordinates = self._space.guided([random.random() for _ in range(len(self._space))])
            if not self._is_known(coordinates) and not self._space.broken(coordinates):
                attributes = proposal.trial_attrs, proposal.study_attrs
                self._sampler.adopt(TrialRecord(number, "running", coordinates, None, (), *attributes))
                return replace(proposal, coordinates=coordinates, draw=draw)
        return proposal

    def _is_known(self, coordinates: Mapping[str, Any]) -> bool:
        params = self._space.decode(coordinates)
        return any(is_alike(params, known) for known in self._known)

    def features(self) -> Mapping[int, Point]:
        return self._sampler.features() if isinstance(self._sampler, Featuring) else {}

    def exhausted(self, number: int) -> str:
        return self._sampler.exhausted(number)


class DeduplicatingSampler:
    """Replaces a proposal that repeats an earlier trial by the nearest configuration that no trial has tried.

    A proposal that repeats a trial of another study, `known`, is replaced too, while a configuration remains that is
    new to both studies. The nearest configuration differs least in the unit cube, with 1 for each differing choice;
    ties are broken by a draw that depends on the trial's number. Once all configurations have been tried the sampler is
    exhausted and its proposals stay. The first `enqueued` proposals, the user's, always stay.
    """

    def __init__(
        self, sampler: Sampler, space: Space, seed: int, enqueued: int, known: Sequence[TrialRecord] = ()
    ) -> None:
        self._sampler, self._space, self._seed, self._enqueued = sampler, space, seed, enqueued
        self._known = {configuration(space, record.coordinates) for record in known}
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
        elif len(record.coordinates) == len(self._space):  # otherwise it is older than a change of the space
            self._tried[record.number] = configuration(self._space, record.coordinates)

    @cached_property
    def _all(self) -> dict[str, dict[str, Any]]:
        """Returns every configuration's coordinates; a grid of `FEW` points has each value of a countable dimension."""
        grid = self._space.grid(FEW)
        points = (grid.point(number) for number in range(grid.size))
        return {configuration(self._space, coordinates): coordinates for coordinates in points}

    def ask(self, number: int) -> Proposal:
        proposal = self._sampler.ask(number)
        key = configuration(self._space, proposal.coordinates)
        if number >= self._enqueued and (left := self._instead_of(key)):
            proposal = replace(proposal, coordinates=self._nearest(proposal.coordinates, left, number), draw=1)
            attributes = proposal.trial_attrs, proposal.study_attrs
            self._sampler.adopt(TrialRecord(number, "running", proposal.coordinates, None, (), *attributes))
            key = configuration(self._space, proposal.coordinates)
        self._tried[number] = key
        return proposal

    def _instead_of(self, key: str) -> list[dict[str, Any]]:
        """Returns the configurations that may replace a proposal; empty if it may stay.

        They are those that no study has tried or, once none are left, those that this study has not tried.
        """
        if key not in self._known and key not in self._tried.values():
            return []
        left = self._left()
        new = [at for at in left if configuration(self._space, at) not in self._known] if self._known else left
        return new or (left if key in self._tried.values() else [])

    def _left(self) -> list[dict[str, Any]]:
        """Returns the configurations that have not been tried, in the order of the grid."""
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
        size = self._space.grid(FEW).size
        if number < self._enqueued or len(self._tried) < size or self._left():
            return self._sampler.exhausted(number)
        return f"the space has {size} configurations, and each has been tried"
