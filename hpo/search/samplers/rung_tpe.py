"""Implements the sampler of BOHB (Falkner et al. 2018, "BOHB: Robust and Efficient Hyperparameter Optimization at
Scale", ICML, section 3.2): TPE on the losses at the highest rung with enough of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import optuna

from hpo.search.samplers.base import Proposal, TrialRecord, ask_seed, is_open, is_scored, is_valueless
from hpo.search.samplers.optuna_sampler import fail
from hpo.search.samplers.registry import Random
from hpo.search.samplers.tpe import Tpe
from hpo.space.objective import Objective

if TYPE_CHECKING:
    from hpo.space.space import Space

SHARE = 3  # one in three proposals is drawn at random: rho of the paper is 1 / 3


class RungTpe(Tpe):
    """TPE on the losses at the highest epoch at which d + 3 trials or more have a finite loss.

    That is the paper's N_min + 2 for d dimensions. Trials enter with their loss at that epoch. Trials that are
    infeasible, break constraints or were stopped on a loss that is not finite rank behind all others; failed trials do
    not enter. Until there is such an epoch, and later with probability 1/3, a proposal is drawn at random, around
    priors if there are any; which ones is a function of the study's seed and the trial's number. Optuna's TPE calls a
    tenth of the trials good, the paper 15 %. Curves exist for one objective only: with several, the model uses complete
    trials.
    """

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int) -> None:
        self._rung: int | None = None
        self._random = Random(space, objectives, seed)
        self._enough = len(space) + 3
        super().__init__(space, objectives, seed, n_startup_trials=1)

    def ask(self, number: int) -> Proposal:
        rung = self._highest()
        if rung is None or ask_seed(self._seed, number, draw=1) % SHARE == 0:
            drawn = self._random.ask(number)
            self.adopt(TrialRecord(number, "running", drawn.coordinates))
            return drawn
        if rung != self._rung:
            self._rung = rung
            self._clear()
        return super().ask(number)

    def _highest(self) -> int | None:
        """Returns the epoch whose losses the model uses; None while too few trials have a loss."""
        known: Counter[int] = Counter()
        for record in (*self._earlier, *self._records.values()):
            if len(self._directions) > 1:
                known[0] += record.state == "complete" and is_scored(record)
            elif not is_open(record) and record.state != "failed":
                known.update({epoch for epoch, value in record.curve if math.isfinite(value)})
        return max((epoch for epoch, count in known.items() if count >= self._enough), default=None)

    def _end(self, trial: optuna.Trial, record: TrialRecord) -> None:
        objectives = len(self._directions)
        if record.state in ("infeasible", "failed") or is_valueless(record, objectives) or objectives > 1:
            super()._end(trial, record)
            return
        value = next((value for epoch, value in record.curve if epoch == self._rung and math.isfinite(value)), None)
        if value is None:
            fail(self._study, trial)
        else:
            self._study.tell(trial, value)
