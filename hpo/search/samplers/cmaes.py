"""Runs CMA-ES (Hansen 2016, "The CMA Evolution Strategy: A Tutorial") from the package `cmaes`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpo.errors import UserError
from hpo.search.samplers.base import Proposal, TrialRecord, ask_seed, is_broken, is_valueless, reached
from hpo.search.samplers.registry import Random
from hpo.space.objective import Objective

if TYPE_CHECKING:
    from hpo.space.space import Space

_GENERATION = "cmaes:generation"  # trial attribute: how often the distribution was updated before the draw
_SIGMA = 1 / 6  # of the unit cube's edge: three sigmas reach from its middle to its sides
_FEW = 10  # fewer trials from other sources give no distribution to start from


class Cmaes:
    """A normal distribution over the unit cube of the numeric dimensions; choices are drawn at random.

    A generation is the first 4 + floor(3 ln d) trials by number, drawn from one distribution, that have ended. The
    distribution is rebuilt from all generations and never stored. Trials that end after their generation is full are
    ignored, and so are trials that lack coordinates. Trials enter by state or source:

    complete           with their value
    pruned, paused     with the last value of their curve
    infeasible         behind all others; so does a trial stopped on a value that is not finite
    failed             not at all
    other sources      they set the start: ten or more trials give the distribution of their best tenth (Nomura et al.
                       2021, "Warm Starting CMA-ES"), fewer give the best of them, none give the dimensions' priors or
                       the middle of the cube

    Raises UserError for several objectives.
    """

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int) -> None:
        if len(objectives) != 1:
            raise UserError(
                f"sampler 'cmaes' takes one objective and the study has {len(objectives)}: choose nsga2, nsga3 or tpe."
            )
        self._space, self._seed = space, seed
        self._sign = -1.0 if objectives[0].direction == "maximize" else 1.0
        self._numeric = [path for path, seen in space.coordinates.items() if seen[0] != "choice"]
        self._random = Random(space, objectives, seed)
        self._ended: dict[int, tuple[int | None, list[float], float]] = {}  # number -> generation, point, loss
        self._earlier: list[tuple[list[float], float]] = []
        self._optimizer: Any = None
        self._past: tuple[Any, ...] = ()  # the start and the generations that the optimizer was built from

    def adopt(self, record: TrialRecord) -> None:
        self._ended.pop(record.number, None)

    def tell(self, record: TrialRecord) -> None:
        self._ended.pop(record.number, None)
        values = reached(record, 1)
        if values is None and not is_valueless(record, 1):
            return
        if all(path in record.coordinates for path in self._numeric):
            loss = math.inf if values is None or is_broken(record) else self._sign * values[0]
            self._ended[record.number] = (record.trial_attrs.get(_GENERATION), self._point(record), loss)

    def warm(self, records: Sequence[TrialRecord]) -> None:
        """Starts from complete trials of another study."""
        ends = [(record, values) for record in records if (values := reached(record, 1))]
        self._earlier = [(self._point(record), self._sign * values[0]) for record, values in ends]

    def _point(self, record: TrialRecord) -> list[float]:
        """Returns the trial's point in the unit cube of the numeric dimensions."""
        return [self._space.dimensions[path].to_unit(record.coordinates[path]) for path in self._numeric]

    def ask(self, number: int) -> Proposal:
        drawn = self._random.ask(number)
        if not self._numeric:
            return drawn
        optimizer = self._made()
        optimizer.reseed_rng(drawn.seed % 2**32)
        point = dict(zip(self._numeric, optimizer.ask().tolist(), strict=True))
        dimensions = self._space.dimensions
        moved = {path: dimensions[path].from_unit(min(max(u, 0.0), 1.0)) for path, u in point.items()}
        return Proposal(drawn.coordinates | moved, drawn.seed, trial_attrs={_GENERATION: optimizer.generation})

    def exhausted(self, number: int) -> str:
        return ""

    def _made(self) -> Any:
        """Returns the optimizer after every full generation; extends the last one if only new generations follow."""
        ended_records = [self._ended[number] for number in sorted(self._ended)]
        start = self._earlier + [
            (point, loss) for generation, point, loss in ended_records if generation is None and math.isfinite(loss)
        ]
        generations: dict[int, list[tuple[list[float], float]]] = {}
        for generation, point, loss in ended_records:
            if generation is not None:
                generations.setdefault(generation, []).append((point, loss))
        size = 4 + math.floor(3 * math.log(len(self._numeric)))
        full: list[list[tuple[list[float], float]]] = []
        while len(generations.get(len(full), ())) >= size:
            full.append(generations[len(full)][:size])
        applied = self._past[1:]
        if not self._past or self._past[0] != start or applied != tuple(full[: len(applied)]):
            self._optimizer, applied = self._begun(start, size), ()
        for solutions in full[len(applied) :]:
            self._tell(solutions)
        self._past = (start, *full)
        return self._optimizer

    def _tell(self, solutions: Sequence[tuple[list[float], float]]) -> None:
        from numpy import array

        self._optimizer.tell([(array(point), loss) for point, loss in solutions])

    def _begun(self, start: list[tuple[list[float], float]], size: int) -> Any:
        """Returns an optimizer without any generation."""
        import cmaes
        from numpy import array

        mean, sigma, cov = array([self._space.dimensions[path].centre for path in self._numeric]), _SIGMA, None
        if len(start) >= _FEW:
            mean, sigma, cov = cmaes.get_warm_start_mgd([(array(point), loss) for point, loss in start])
        elif start:
            mean = array(min(start, key=lambda solution: solution[1])[0])
        bounds = array([[0.0, 1.0]] * len(self._numeric))
        seed = ask_seed(self._seed, -1) % 2**32
        tries = 10 * len(self._numeric)
        return cmaes.CMA(mean, sigma, bounds, tries, seed=seed, population_size=size, cov=cov)
