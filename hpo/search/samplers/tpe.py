"""Wraps Optuna's TPE (Bergstra et al. 2011; multivariate, Falkner et al. 2018)."""

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
    """Optuna's TPE sampler. Trials enter its model by state:

    complete     with their values
    pruned       as PRUNED with their last value: ranked behind complete trials, by epoch reached, then by value;
                 with several objectives with their values there
    paused       like pruned, at the rung where they wait
    infeasible   as violating a constraint: behind every feasible trial, by the violation, and never the best; so does a
                 trial stopped on a value that is not finite
    failed       not at all
    running      as if their result were bad ("constant liar"), which keeps proposals apart

    A trial that lacks coordinates enters with those it has; Optuna then models the missing dimensions independently.
    Optuna's system attributes repeat the coordinates of a running trial, so none are kept.
    """

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int, n_startup_trials: int = 10) -> None:
        self._startup = n_startup_trials
        super().__init__(space, objectives, seed)

    def _sampler(self, seed: int) -> BaseSampler:
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=self._startup)

    def _end(self, trial: optuna.Trial, record: TrialRecord) -> None:
        single = len(self._directions) == 1
        values = None if single and record.state in ("pruned", "paused") else reached(record, len(self._directions))
        if record.state == "failed":
            fail(self._study, trial)
        elif values is not None:
            self._study.tell(trial, list(values))
        else:
            if is_valueless(record, len(self._directions)) and not is_broken(record):
                trial.set_constraint("feasible", 1.0)
            if record.curve and single:
                epoch, value = record.curve[-1]
                trial.report(value, epoch)
            self._study.tell(trial, state=TrialState.PRUNED)
