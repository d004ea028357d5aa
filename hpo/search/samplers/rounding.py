"""Wraps a sampler that uses floating-point libraries, so that its proposals are the same on every processor.

OpenBLAS chooses kernels by processor, and they differ in the last bits of a product; a model's proposals then differ by
about 1e-11 of their value. Rounded to 8 significant digits they are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpo.search.promotion.base import Featuring, Point
from hpo.search.samplers.base import Proposal, Sampler, TrialRecord
from hpo.space.dimension import Coordinate

if TYPE_CHECKING:
    from hpo.space.space import Space

_DIGITS = 8


def rounded(kind: Coordinate, value: Any) -> Any:
    """Returns a coordinate, rounded to 8 significant digits and clipped to its bounds if it is continuous."""
    if kind[0] == "unit":
        low, high, step = 0.0, 1.0, None
    elif kind[0] == "float":
        _, low, high, _, step = kind
    else:
        return value
    if step is not None:
        return value
    return min(max(float(f"{value:.{_DIGITS - 1}e}"), float(low)), float(high))


class RoundingSampler:
    """Rounds the continuous coordinates of each proposal and tells the sampler the rounded ones."""

    def __init__(self, sampler: Sampler, space: Space) -> None:
        self._sampler, self._space = sampler, space

    def adopt(self, record: TrialRecord) -> None:
        self._sampler.adopt(record)

    def tell(self, record: TrialRecord) -> None:
        self._sampler.tell(record)

    def ask(self, number: int) -> Proposal:
        proposal = self._sampler.ask(number)
        kinds = self._space.coordinates
        coordinates = {path: rounded(kinds[path], value) for path, value in proposal.coordinates.items()}
        if coordinates == proposal.coordinates:
            return proposal
        proposal = replace(proposal, coordinates=coordinates)
        attributes = proposal.trial_attrs, proposal.study_attrs
        self._sampler.adopt(TrialRecord(number, "running", coordinates, None, (), *attributes))
        return proposal

    def features(self) -> Mapping[int, Point]:
        return self._sampler.features() if isinstance(self._sampler, Featuring) else {}

    def exhausted(self, number: int) -> str:
        return self._sampler.exhausted(number)
