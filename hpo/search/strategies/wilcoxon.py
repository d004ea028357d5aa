"""Defines a strategy that stops trials by a signed-rank test between two learning curves (Wilcoxon 1945, "Individual
Comparisons by Ranking Methods")."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

from pydantic import Field

from hpo.search.curves import Curve
from hpo.search.strategies.base import BaseStrategy, History
from trainer.report import CONTINUE, Verdict


class Wilcoxon(BaseStrategy):
    """Stops a trial whose losses are, epoch by epoch, significantly above those of the best complete trial.

    p_threshold        the p value of the one-sided signed-rank test below which a trial is stopped
    n_startup_epochs   epochs that both trials must have reported before the test is made; at least two

    The best complete trial is the one with the lowest mean loss over its epochs; trials with a loss that is not finite
    are excluded. As a safeguard a trial is not stopped if its own mean is as low. It decides like
    optuna.pruners.WilcoxonPruner if that has epochs as its steps and their mean as a trial's value. The epochs of a
    curve depend on each other, and the test is made at each of them, so `p_threshold` sets the strictness and does not
    equal an error rate.
    """

    name: Literal["wilcoxon"] = "wilcoxon"
    p_threshold: float = Field(default=0.1, ge=0.0, le=1.0)
    n_startup_epochs: int = Field(default=2, ge=0)

    def wants(self, epoch: int) -> bool:
        wanted = epoch >= max(2, self.n_startup_epochs)
        if wanted:
            _signed_rank()  # a decision holds the ledger's write lock
        return wanted

    def decide(self, history: History) -> Verdict:
        losses, mean = dict(history.curve), _mean(history.curve)
        complete = history.curves(("complete",))
        known = {number: _mean(curve) for number, curve in complete.items() if curve}
        means = {number: other for number, other in known.items() if math.isfinite(other)}
        if not means or not math.isfinite(mean):
            return CONTINUE
        number = min(means, key=lambda number: (means[number], number))
        best = dict(complete[number])
        differences = [losses[epoch] - best[epoch] for epoch in sorted(losses.keys() & best.keys())]
        if len(differences) < max(2, self.n_startup_epochs) or mean <= means[number]:
            return CONTINUE
        test = _signed_rank()(differences, alternative="greater", zero_method="zsplit")
        p = float(test.pvalue)
        if p < self.p_threshold:
            return Verdict("stop", reason=f"above trial {number} in {len(differences)} epochs, p = {p:.2g}")
        return CONTINUE


@cache
def _signed_rank() -> Callable[..., Any]:
    from scipy.stats import wilcoxon

    return wilcoxon


def _mean(curve: Curve) -> float:
    """Returns the mean loss, which is not finite where a loss is not."""
    return sum([loss for _, loss in curve]) / len(curve)
