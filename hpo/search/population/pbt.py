"""Population based training (Jaderberg et al. 2017, "Population Based Training of Neural Networks")."""

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
    """A population whose replaced members take over a better one's checkpoint and perturb its hyperparameters.

    Perturbed is what is active there: a number by a factor of 0.8 or 1.2, within its range, to the nearest value it may
    have and at least one step on; with probability `resample` it is drawn anew, from the prior where there is one. A
    choice or a Bool, which has no neighbours, is only ever drawn anew.
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
        """The coordinates with the dimensions at `paths` changed that are active there."""
        resample = self._strategy.resample
        for path, (anew, place, up) in zip(paths, rng.random((len(paths), 3)).tolist(), strict=True):
            params, dimension = self._space.decode(coordinates), self._space.dimensions[path]
            if path not in params:
                continue
            if anew < resample:
                coordinates[path] = dimension.guided(place)
            else:
                there, divisor = self._space.there(path, params)
                value = perturbed(there.set_relative(False), params[path], FACTORS[int(up < 0.5)], divisor)
                coordinates[path] = there.at(value, divisor)
        return coordinates


def perturbed(dimension: Dimension, value: Any, factor: float, divisor: int = 1) -> Any:
    """The value of the dimension that `factor` leads to from `value`; the same where it has no neighbours there."""
    if isinstance(dimension, Float):
        onward = [value * factor]
        if dimension.step is not None:
            onward.append(value + (dimension.step if value * factor > value else -dimension.step))
        found = (dimension.value(min(max(one, dimension.low), dimension.high)) for one in onward)
    elif isinstance(dimension, Int):
        allowed = dimension.allowed(divisor)
        above = bisect_left(allowed, value * factor)
        around = allowed[max(above - 1, 0) : above + 1]
        after = allowed.index(value) + (1 if factor > 1 else -1)
        nearest = min(around, key=lambda one: abs(one - value * factor))
        found = iter([nearest, allowed[min(max(after, 0), len(allowed) - 1)]])
    else:
        return value
    return next((one for one in found if one != value), value)
