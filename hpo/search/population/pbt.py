"""Implements population based training (Jaderberg et al. 2017, "Population Based Training of Neural Networks")."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from hpo.search.population.base import Generations, Population
from hpo.search.samplers.base import Sampler, TrialRecord
from hpo.space.dimension import Dimension
from hpo.space.dimensions import Float, Int
from hpo.space.objective import Objective

if TYPE_CHECKING:
    from numpy.random import Generator

    from hpo.space.space import Space

FACTORS = (0.8, 1.2)


class Pbt(Generations):
    """A population whose replaced members take over a better member's checkpoint and perturb its hyperparameters.

    Only active dimensions change. A number is multiplied by 0.8 or 1.2 and moved to the nearest allowed value within
    its range, at least one step away; with probability `resample` it is drawn anew, from its prior if it has one. A
    choice or a Bool has no neighbours, so it is only ever drawn anew.
    """

    name: Literal["pbt"] = "pbt"

    def sampler(
        self,
        first: Sampler,
        space: Space,
        objectives: Sequence[Objective],
        seed: int,
        versions: Mapping[str, int] = MappingProxyType({}),
    ) -> Sampler:
        return Perturbed(self, first, space, objectives, seed)


class Perturbed(Population):
    """The sampler of `pbt`."""

    def _explore(self, number: int, donor: TrialRecord, rng: Generator) -> dict[str, Any]:
        return self._perturbed(self._whole(donor), self._paths, rng)

    def _perturbed(self, coordinates: dict[str, Any], paths: Sequence[str], rng: Generator) -> dict[str, Any]:
        """Returns the coordinates after perturbing the dimensions at `paths` that are active there."""
        resample = self._strategy.resample
        for path, (anew, share, up) in zip(paths, rng.random((len(paths), 3)).tolist(), strict=True):
            params, dimension = self._space.decode(coordinates), self._space.dimensions[path]
            if path not in params:
                continue
            if anew < resample:
                coordinates[path] = dimension.guided(share)
            else:
                conditional, divisor = self._space.there(path, params)
                value = perturbed(conditional.set_relative(False), params[path], FACTORS[int(up < 0.5)], divisor)
                coordinates[path] = conditional.at(value, divisor)
        return coordinates


def perturbed(dimension: Dimension, value: Any, factor: float, divisor: int = 1) -> Any:
    """Returns the dimension's value at `value` times `factor`; `value` itself if it has no neighbour on that side."""
    if isinstance(dimension, Float):
        onward = [value * factor]
        if dimension.step is not None:
            onward.append(value + (dimension.step if value * factor > value else -dimension.step))
        neighbours = (dimension.value(min(max(target, dimension.low), dimension.high)) for target in onward)
    elif isinstance(dimension, Int):
        allowed = dimension.allowed(divisor)
        above = bisect_left(allowed, value * factor)
        around = allowed[max(above - 1, 0) : above + 1]
        after = allowed.index(value) + (1 if factor > 1 else -1)
        nearest = min(around, key=lambda number: abs(number - value * factor))
        neighbours = iter([nearest, allowed[min(max(after, 0), len(allowed) - 1)]])
    else:
        return value
    return next((neighbour for neighbour in neighbours if neighbour != value), value)
