"""Asynchronous successive halving, stopping variant (Li et al. 2020, "A System for Massively Parallel
Hyperparameter Tuning", MLSys): no trial pauses at a rung, the losing ones stop there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from hpo.search.pareto import Losses, ahead, is_nan
from hpo.search.strategies.base import History
from trainer.report import CONTINUE, Verdict


def first_rung(epochs: float) -> int:
    """The first rung of a study that gives none, by the epochs of its trials: 4, since what comes before says next to
    nothing of the last (docs/decisions/0051); of 5 to 9 epochs the nearest to their root, which is sooner
    (docs/decisions/0070)."""
    return round(math.sqrt(epochs)) if 4 < epochs < 10 else 4


class Asha(BaseModel):
    """Rungs at min_epochs * eta^k epochs; a trial goes on from a rung if it is among the best 1/eta seen there.

    min_epochs   r, the first rung; of a study that gives none `first_rung`
    eta          the reduction factor, 2 or more
    max_epochs   R, the full length of a trial: no rung at or above it. None puts no bound.

    Of n losses recorded at a rung, the trial's own included, the best max(1, floor(n / eta)) go on, ties too:
    the paper promotes floor(n / eta); as nothing pauses here, the best so far goes on while that is 0. A trial
    whose loss is not finite stops at its rung and counts there as the worst. Trials that do not report at every epoch
    meet a rung at their first report from it on, and are compared with those that reported at that same epoch.

    Several objectives: trials are ranked by fronts of non-dominated losses and within one as `pareto.spread` has
    it (Schmucker et al. 2021, "Multi-objective Asynchronous Successive Halving").
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    several: ClassVar[bool] = True
    rungs: ClassVar[bool] = True
    name: Literal["asha"] = "asha"
    min_epochs: int = Field(default=4, ge=1)
    eta: int = Field(default=3, ge=2)
    max_epochs: int | None = Field(default=None, ge=1)

    def wants(self, epoch: int) -> bool:
        return self.rung(epoch) is not None

    @property
    def first(self) -> int:
        """The first rung's epoch."""
        return self.min_epochs

    def rung(self, epoch: int) -> int | None:
        """k of the highest rung at or below `epoch`; None below the first one and from `max_epochs` on."""
        if epoch < self.first or (self.max_epochs is not None and epoch >= self.max_epochs):
            return None
        rung, level = 0, self.first * self.eta
        while level <= epoch:
            rung, level = rung + 1, level * self.eta
        return rung

    def decide(self, history: History) -> Verdict:
        rung, curve = self.rung(history.epoch), history.curve
        if rung is None or (len(curve) > 1 and self.rung(curve[-2][0]) == rung):
            return CONTINUE  # no rung here, or it was met by an earlier report
        if is_nan(history.value):
            return Verdict("stop", reason=f"the objective is not finite at rung {rung} (epoch {history.epoch})")
        return self.judge(history, rung)

    def judge(self, history: History, rung: int) -> Verdict:
        """The verdict on a finite loss at a rung that was not met before."""
        others = history.at(history.epoch)
        ahead = _ahead(others, history.number, history.value)
        keep = max(1, (len(others) + 1) // self.eta)
        if ahead < keep:
            return CONTINUE
        where = f"at rung {rung} (epoch {history.epoch})"
        return Verdict("stop", reason=f"rank {ahead + 1} of {len(others) + 1} {where}; the best {keep} go on")


def _ahead(others: Mapping[int, Any], number: int, loss: float | Losses) -> int:
    """How many of the others a trial with this loss comes behind; of equal losses none is ahead of the other."""
    if not isinstance(loss, tuple):
        return sum(other < loss for other in others.values())
    return ahead({**others, number: loss}, number)
