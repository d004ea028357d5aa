"""Samplers of Optuna's whose models know complete trials only: Gaussian processes and genetic algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import optuna
from optuna.samplers import BaseSampler

from hpo.search.samplers.base import Proposal, TrialRecord, is_valueless, reached
from hpo.search.samplers.optuna_sampler import OptunaSampler, distribution, fail
from hpo.space.dimensions import Coordinate
from hpo.space.objective import Objective
from hpo.space.values import LISTED

if TYPE_CHECKING:
    from hpo.space.space import Space


class Valued(OptunaSampler):
    """How trials enter the model.

    complete     by their values
    pruned       by the last value of their curve; with several objectives by their last values
    paused       like pruned
    infeasible   by their values and how far they break a constraint; where they have no values with the worst of all
                 others', which keeps proposals away; so is one that is complete or was stopped, but not finite
    failed       not at all

    A trial that lacks coordinates, since the space has changed, does not enter.
    """

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int) -> None:
        self._worst: tuple[float, ...] | None = None
        super().__init__(space, objectives, seed)

    def ask(self, number: int) -> Proposal:
        if (worst := self._worst_of_all()) != self._worst:
            self._worst = worst
            self._clear()
        return super().ask(number)

    def _worst_of_all(self) -> tuple[float, ...] | None:
        """The worst value of each objective among the trials that have some, where a trial is to get it."""
        if not any(is_valueless(record, len(self._directions)) for record in self._records.values()):
            return None
        found = [values for record in self._records.values() if (values := reached(record, len(self._directions)))]
        columns = zip(self._directions, zip(*found, strict=True), strict=True)
        return tuple((max if way == "minimize" else min)(column) for way, column in columns) if found else None

    def _enter(self, trial: optuna.Trial, record: TrialRecord) -> None:
        if record.coordinates.keys() < self._distributions.keys():
            fail(self._study, trial)
        else:
            super()._enter(trial, record)

    def _end(self, trial: optuna.Trial, record: TrialRecord) -> None:
        values = reached(record, len(self._directions))
        if is_valueless(record, len(self._directions)):
            values = self._worst
        if values is None:
            fail(self._study, trial)
        else:
            self._study.tell(trial, list(values))


class Gp(Valued):
    """A Gaussian process with log expected improvement (Ament et al. 2023); asks take longer with every trial.

    Running trials count as open questions, so that proposals keep apart.
    """

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int, n_startup_trials: int = 10) -> None:
        self._startup = n_startup_trials
        super().__init__(space, objectives, seed)
        # Optuna lists the values of a dimension with steps: where they are many it gets one without.
        self._many = {path: seen for path, seen in space.coordinates.items() if _steps(seen) > LISTED}
        for path, (_, low, high, log, _) in self._many.items():
            self._distributions[path] = distribution(("float", float(low), float(high), log, None))

    def _coordinate(self, path: str, drawn: Any) -> Any:
        if path not in self._many:
            return drawn
        _, low, high, _, step = self._many[path]
        return min(low + round((drawn - low) / step) * step, high)

    def _sampler(self, seed: int) -> BaseSampler:
        return optuna.samplers.GPSampler(seed=seed, n_startup_trials=self._startup, warn_independent_sampling=False)


def _steps(seen: Coordinate) -> float:
    return (seen[2] - seen[1]) / seen[4] if seen[0] in ("float", "int") and seen[4] else 0


class _Genetic(Valued):
    """A generation is bred from the best of all before it, once `population_size` of the last one have ended.

    A trial's generation, and the parents of each, are kept with the proposals: when they were drawn is what counts.
    Trials that another sampler or the user has proposed are of the first generation.
    """

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int, population_size: int = 50) -> None:
        self._population = population_size
        super().__init__(space, objectives, seed)

    def _attributes(self, record: TrialRecord) -> dict[str, Any]:
        return {f"{self.KEEPS[0]}generation": 0} | super()._attributes(record)


class Nsga2(_Genetic):
    """NSGA-II (Deb et al. 2002): by fronts of trials that no other is better than, then by crowding."""

    KEEPS = ("NSGAIISampler:",)

    def _sampler(self, seed: int) -> BaseSampler:
        return optuna.samplers.NSGAIISampler(seed=seed, population_size=self._population)


class Nsga3(_Genetic):
    """NSGA-III (Deb and Jain 2014): by fronts, then by how the trials spread over reference directions."""

    KEEPS = ("NSGAIIISampler:",)

    def _sampler(self, seed: int) -> BaseSampler:
        return optuna.samplers.NSGAIIISampler(seed=seed, population_size=self._population)
