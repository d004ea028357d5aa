"""Wraps Optuna's samplers whose models use complete trials only: Gaussian processes and genetic algorithms."""

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
    """The base of samplers whose model needs a value for each trial. Trials enter it by state:

    complete     with their values
    pruned       with the last value of their curve; with several objectives with their last values
    paused       like pruned
    infeasible   with their values and their violation of the constraints; without values, with the worst values of all
                 others, which keeps proposals away; so does a complete or stopped trial whose value is not finite
    failed       not at all

    A trial that lacks coordinates because the space has changed does not enter.
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
        """Returns the worst value of each objective; None if no trial needs it or no trial has values."""
        if not any(is_valueless(record, len(self._directions)) for record in self._records.values()):
            return None
        rows = [values for record in self._records.values() if (values := reached(record, len(self._directions)))]
        columns = zip(self._directions, zip(*rows, strict=True), strict=True)
        return tuple((max if way == "minimize" else min)(column) for way, column in columns) if rows else None

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

    Running trials count as pending observations, which keeps proposals apart.
    """

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int, n_startup_trials: int = 10) -> None:
        self._startup = n_startup_trials
        super().__init__(space, objectives, seed)
        # Optuna lists all values of a dimension with steps, so one with many values is passed without steps.
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
    """Breeds a generation from the best of all earlier ones, once `population_size` trials of the last have ended.

    Proposals keep the generation and parents with which they were drawn. Trials proposed by another sampler or by the
    user belong to the first generation.
    """

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int, population_size: int = 50) -> None:
        self._population = population_size
        super().__init__(space, objectives, seed)

    def _attributes(self, record: TrialRecord) -> dict[str, Any]:
        return {f"{self.KEEPS[0]}generation": 0} | super()._attributes(record)


class Nsga2(_Genetic):
    """NSGA-II (Deb et al. 2002): selects by non-dominated fronts, then by crowding distance."""

    KEEPS = ("NSGAIISampler:",)

    def _sampler(self, seed: int) -> BaseSampler:
        return optuna.samplers.NSGAIISampler(seed=seed, population_size=self._population)


class Nsga3(_Genetic):
    """NSGA-III (Deb and Jain 2014): selects by non-dominated fronts, then by spread over reference directions."""

    KEEPS = ("NSGAIIISampler:",)

    def _sampler(self, seed: int) -> BaseSampler:
        return optuna.samplers.NSGAIIISampler(seed=seed, population_size=self._population)
