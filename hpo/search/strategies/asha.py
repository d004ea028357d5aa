"""Implements asynchronous successive halving by stopping (Li et al. 2020, "A System for Massively Parallel
Hyperparameter Tuning", MLSys): no trial pauses at a rung, losing trials stop there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from hpo.search.pareto import Losses, ahead, is_nan
from hpo.search.strategies.base import BaseStrategy, History
from trainer.report import CONTINUE, Verdict


def first_rung(epochs: float) -> int:
    """Returns the default first rung for trials of this many epochs.

    It is 4, since earlier losses say little about the last one (docs/decisions/0051); for 5 to 9 epochs it is their
    rounded square root, which is earlier (docs/decisions/0070).
    """
    return round(math.sqrt(epochs)) if 4 < epochs < 10 else 4


class Asha(BaseStrategy):
    """Sets rungs at min_epochs * eta^k epochs; a trial continues past a rung if it is among the best 1/eta seen there.

    min_epochs   r, the first rung; `first_rung` if a study does not set it
    eta          the reduction factor, 2 or more
    max_epochs   R, the full length of a trial: all rungs lie below it. None sets no bound.

    With n losses recorded at a rung, the trial's own included, the best max(1, floor(n / eta)) continue, ties too. The
    paper promotes floor(n / eta); as nothing pauses here, the best so far continues while that is 0. A trial whose loss
    is not finite stops at its rung and counts there as the worst. A trial that does not report at every epoch meets a
    rung at its first report from there on, and is compared with trials that reported at that same epoch.

    With several objectives trials are ranked by fronts of non-dominated losses, and within a front by `pareto.spread`
    (Schmucker et al. 2021, "Multi-objective Asynchronous Successive Halving").
    """

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
        """Returns the epoch of the first rung."""
        return self.min_epochs

    def rung(self, epoch: int) -> int | None:
        """Returns k of the highest rung at or below `epoch`; None below the first rung and from `max_epochs` on."""
        if epoch < self.first or (self.max_epochs is not None and epoch >= self.max_epochs):
            return None
        rung, level = 0, self.first * self.eta
        while level <= epoch:
            rung, level = rung + 1, level * self.eta
        return rung

    def decide(self, history: History) -> Verdict:
        rung, curve = self.rung(history.epoch), history.curve
        if rung is None or (len(curve) > 1 and self.rung(curve[-2][0]) == rung):
            return CONTINUE  # this epoch is not a rung, or an earlier report reached it
        if is_nan(history.value):
            return Verdict("stop", reason=f"the objective is not finite at rung {rung} (epoch {history.epoch})")
        return self.judge(history, rung)

    def judge(self, history: History, rung: int) -> Verdict:
        """Returns the verdict on a finite loss at a rung that the trial had not met before."""
        others = history.at(history.epoch)
        ahead = _ahead(others, history.number, history.value)
        keep = max(1, (len(others) + 1) // self.eta)
        if ahead < keep:
            return CONTINUE
        where = f"at rung {rung} (epoch {history.epoch})"
        best = "only the best goes on" if keep == 1 else f"the best {keep} go on"
        return Verdict("stop", reason=f"rank {ahead + 1} of {len(others) + 1} {where}; {best}")


def _ahead(others: Mapping[int, Any], number: int, loss: float | Losses) -> int:
    """Returns how many of the others rank ahead of a trial with this loss; equal losses are not ahead of each other."""
    if not isinstance(loss, tuple):
        return sum(other < loss for other in others.values())
    return ahead({**others, number: loss}, number)
