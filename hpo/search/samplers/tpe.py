"""TPE (Bergstra et al. 2011; multivariate, Falkner et al. 2018), Optuna's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import optuna
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from hpo.search.samplers.base import TrialRecord, is_broken, is_valueless, reached
from hpo.search.samplers.optuna_sampler import OptunaSampler, fail
from hpo.space.objective import Objective

if TYPE_CHECKING:
    from hpo.space.space import Space


class Tpe(OptunaSampler):
    """How trials enter the model.

    complete     by their values
    pruned       as PRUNED with their last value: ranked behind the complete ones, by how far they came, then by value;
                 with several objectives by their values there
    paused       like pruned, at the rung they wait at
    infeasible   as violating a constraint: behind every feasible one, by how much, and never the best; so is one
                 stopped on a value that is not finite
    failed       not at all
    running      as if they had gone badly ("constant liar"), which keeps proposals apart

    A trial that lacks coordinates enters with those it has; what it lacks Optuna then models by itself, apart from the
    other dimensions. Its system attributes repeat the coordinates of a running trial, so none are kept.
    """

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int, n_startup_trials: int = 10) -> None:
        self._startup = n_startup_trials
        super().__init__(space, objectives, seed)

    def _sampler(self, seed: int) -> BaseSampler:
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=self._startup)

    def _end(self, trial: optuna.Trial, record: TrialRecord) -> None:
        one = len(self._directions) == 1
        values = None if one and record.state in ("pruned", "paused") else reached(record, len(self._directions))
        if record.state == "failed":
            fail(self._study, trial)
        elif values is not None:
            self._study.tell(trial, list(values))
        else:
            if is_valueless(record, len(self._directions)) and not is_broken(record):
                trial.set_constraint("feasible", 1.0)
            if record.curve and one:
                epoch, value = record.curve[-1]
                trial.report(value, epoch)
            self._study.tell(trial, state=TrialState.PRUNED)
