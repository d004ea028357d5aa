"""Population-based bandits (Parker-Holder et al. 2020, "Provably Efficient Online Hyperparameter Optimization with
Population-Based Bandits", NeurIPS)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from hpo.search.population.base import Generations
from hpo.search.population.pbt import Perturbed
from hpo.search.samplers.base import Sampler, TrialRecord
from hpo.search.samplers.rounding import rounded
from hpo.space.dimensions import Float
from hpo.space.objective import Objective

if TYPE_CHECKING:
    import numpy as np
    from numpy.random import Generator

    from hpo.search.population.gp_bandit import Process, Search
    from hpo.space.space import Space

MEMORY = 200  # of the newest trials: what is older has drifted away, and costs time
_ROBUST_SINCE = 2  # the version of `strategy pb2` from which every processor proposes the same


class Pb2(Generations):
    """`pbt` that chooses the Floats of a replaced member by a bandit: where the loss is expected to fall fastest now.

    A Gaussian process that drifts with time learns, from all generations, by how much the loss fell per epoch where the
    Floats stood; the point of its highest upper confidence bound is taken, given what the rest of the generation is
    trying. Other dimensions are perturbed as under `pbt`. Of a first generation of one epoch nothing is known: the
    second one's Floats are drawn uniformly.
    """

    name: Literal["pb2"] = "pb2"

    def sampler(
        self,
        first: Sampler,
        space: Space,
        objectives: Sequence[Objective],
        seed: int,
        versions: Mapping[str, int] = MappingProxyType({}),
    ) -> Sampler:
        robust = versions.get(f"strategy {self.name}", math.inf) >= _ROBUST_SINCE
        return Bandit(self, first, space, objectives, seed, robust)


class Bandit(Perturbed):
    """The sampler of `pb2`."""

    def __init__(
        self,
        strategy: Generations,
        first: Sampler,
        space: Space,
        objectives: Sequence[Objective],
        seed: int,
        robust: bool,
    ) -> None:
        super().__init__(strategy, first, space, objectives, seed)
        self._robust = robust
        self._floats = [path for path in self._paths if isinstance(space.dimensions[path], Float)]
        self._rest = [path for path in self._paths if path not in self._floats]
        self._fitted: tuple[int, Process] | None = None  # the generation that it is for

    def _explore(self, number: int, donor: TrialRecord, rng: Generator) -> dict[str, Any]:
        from hpo.search.population import gp_bandit

        coordinates = self._perturbed(self._whole(donor), self._rest, rng)
        if not self._floats:
            return coordinates
        generation = number // self._size
        draws = rng.random((gp_bandit.CANDIDATES, len(self._floats)))
        known, pending = self._process(number), self._pending(number)
        point = gp_bandit.suggest(known, pending, float(generation), draws, self._search)
        for path, place in zip(self._floats, point.tolist(), strict=True):
            coordinate = self._space.dimensions[path].from_unit(place)
            coordinates[path] = rounded(self._space.coordinates[path], coordinate) if self._robust else coordinate
        return coordinates

    @property
    def _search(self) -> Search:
        from hpo.search.population import gp_bandit

        return gp_bandit.by_comparisons if self._robust else gp_bandit.by_gradients

    def _process(self, number: int) -> Process:
        """What the generations before that of trial `number` tell."""
        import numpy as np

        from hpo.search.population import gp_bandit

        begin = self._strategy.begin(number)
        if self._fitted is None or self._fitted[0] != begin:
            told = ((one, gain) for one in reversed(range(begin)) if math.isfinite(gain := self._gain(one)))
            known = list(islice(told, MEMORY))[::-1]
            x = np.array([self._point(self._records[one]) for one, _ in known]).reshape(-1, len(self._floats))
            t = np.array([float(one // self._size) for one, _ in known])
            self._fitted = (begin, gp_bandit.fit(x, t, np.array([gain for _, gain in known]), self._search))
        return self._fitted[1]

    def _pending(self, number: int) -> np.ndarray:
        """Where the others of the generation stand: those that go on as they are, and those replaced before."""
        import numpy as np

        _, stay = self._going_on(number)
        there = [self._records[one] for one in sorted(stay)]
        there += [
            self._records[one] for one in range(self._strategy.begin(number), number) if one - self._size not in stay
        ]
        return np.array([self._point(one) for one in there]).reshape(-1, len(self._floats))

    def _point(self, record: TrialRecord) -> list[float]:
        whole = self._whole(record)
        return [self._space.dimensions[path].to_unit(whole[path]) for path in self._floats]

    def _gain(self, number: int) -> float:
        """By how much the loss of a trial fell per epoch, from where its parent ended, or from its first report; NaN
        where that cannot be told."""
        curve = list(self._records[number].curve)
        if (parent := self._records[number].parent) is not None:
            curve = [*self._records[parent].curve[-1:], *curve]
        if len(curve) < 2 or curve[-1][0] == curve[0][0]:
            return math.nan
        (before, first), (after, last) = curve[0], curve[-1]
        return self._sign * (first - last) / (after - before)
