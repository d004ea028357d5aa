"""Implements population-based bandits (Parker-Holder et al. 2020, "Provably Efficient Online Hyperparameter
Optimization with Population-Based Bandits", NeurIPS)."""

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

MEMORY = 200  # how many of the newest trials are used: older ones are out of date and cost time
_ROBUST_SINCE = 2  # the version of `strategy pb2` from which proposals are the same on every processor


class Pb2(Generations):
    """A `pbt` whose bandit sets a replacement's Floats to where it expects the loss to fall fastest now.

    A Gaussian process that drifts with time learns from all generations how fast the loss fell at which Floats. The
    proposal is the point of its highest upper confidence bound, given what the rest of the generation is trying. Other
    dimensions are perturbed as in `pbt`. A first generation of one epoch teaches nothing, so the Floats of the second
    are drawn uniformly.
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
        self._fitted: tuple[int, Process] | None = None  # the first trial of its generation, and the process

    def _explore(self, number: int, donor: TrialRecord, rng: Generator) -> dict[str, Any]:
        from hpo.search.population import gp_bandit

        coordinates = self._perturbed(self._whole(donor), self._rest, rng)
        if not self._floats:
            return coordinates
        generation = number // self._size
        draws = rng.random((gp_bandit.CANDIDATES, len(self._floats)))
        known, pending = self._process(number), self._pending(number)
        point = gp_bandit.suggest(known, pending, float(generation), draws, self._search)
        for path, share in zip(self._floats, point.tolist(), strict=True):
            coordinate = self._space.dimensions[path].from_unit(share)
            coordinates[path] = rounded(self._space.coordinates[path], coordinate) if self._robust else coordinate
        return coordinates

    @property
    def _search(self) -> Search:
        from hpo.search.population import gp_bandit

        return gp_bandit.by_comparisons if self._robust else gp_bandit.by_gradients

    def _process(self, number: int) -> Process:
        """Returns the process fitted to the generations before that of trial `number`."""
        import numpy as np

        from hpo.search.population import gp_bandit

        begin = self._strategy.begin(number)
        if self._fitted is None or self._fitted[0] != begin:
            gains = ((trial, gain) for trial in reversed(range(begin)) if math.isfinite(gain := self._gain(trial)))
            known = list(islice(gains, MEMORY))[::-1]
            x = np.array([self._point(self._records[trial]) for trial, _ in known]).reshape(-1, len(self._floats))
            t = np.array([float(trial // self._size) for trial, _ in known])
            self._fitted = (begin, gp_bandit.fit(x, t, np.array([gain for _, gain in known]), self._search))
        return self._fitted[1]

    def _pending(self, number: int) -> np.ndarray:
        """Returns the points of the rest of the generation: members that continue, and earlier replacements."""
        import numpy as np

        _, stay = self._going_on(number)
        begin = self._strategy.begin(number)
        records = [self._records[trial] for trial in sorted(stay)]
        records += [self._records[trial] for trial in range(begin, number) if trial - self._size not in stay]
        return np.array([self._point(record) for record in records]).reshape(-1, len(self._floats))

    def _point(self, record: TrialRecord) -> list[float]:
        whole = self._whole(record)
        return [self._space.dimensions[path].to_unit(whole[path]) for path in self._floats]

    def _gain(self, number: int) -> float:
        """Returns how much a trial's loss fell per epoch, since the end of its parent or since its first report.

        NaN if there are not two losses at different epochs.
        """
        curve = list(self._records[number].curve)
        if (parent := self._records[number].parent) is not None:
            curve = [*self._records[parent].curve[-1:], *curve]
        if len(curve) < 2 or curve[-1][0] == curve[0][0]:
            return math.nan
        (before, first), (after, last) = curve[0], curve[-1]
        return self._sign * (first - last) / (after - before)
