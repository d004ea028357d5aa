"""Implements the median stopping rule (Golovin et al. 2017, "Google Vizier", section 3.2.2, in Optuna's form)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Literal

from pydantic import Field

from hpo.search.curves import first_losses
from hpo.search.strategies.base import History
from hpo.search.strategies.interval import IntervalStrategy
from trainer.report import CONTINUE, Verdict


class AgainstComplete(IntervalStrategy):
    """Stops a trial whose best loss so far is above a bound that the complete trials set at the same epoch."""

    n_startup_trials: int = Field(default=5, ge=0)
    n_min_trials: int = Field(default=1, ge=1)

    def bound(self, losses: Sequence[float]) -> tuple[str, float]:
        """Returns the bound's name and its value for `losses`, which are not empty."""
        raise NotImplementedError

    def decide(self, history: History) -> Verdict:
        epoch = history.epoch
        if not self.due(history):
            return CONTINUE
        complete = history.curves(("complete",))
        if not complete or len(complete) < self.n_startup_trials:
            return CONTINUE
        best = min((loss for _, loss in history.curve if not math.isnan(loss)), default=math.nan)
        if math.isnan(best):
            return Verdict("stop", reason=f"no finite loss up to epoch {epoch}")
        at_epoch = first_losses(complete, epoch, epoch + 1).values()
        finite = [loss for loss in at_epoch if not math.isnan(loss)]
        if len(at_epoch) < self.n_min_trials or not finite:
            return CONTINUE
        name, bound = self.bound(finite)
        if best > bound:
            return Verdict(
                "stop",
                reason=f"best loss {best:g} is above the {name} {bound:g} of {len(finite)} trials at epoch {epoch}",
            )
        return CONTINUE


class Median(AgainstComplete):
    """Stops a trial whose best loss so far is above the median loss of the complete trials at the same epoch.

    n_startup_trials   complete trials that must exist before any trial is stopped
    n_warmup_epochs    epochs in which no trial is stopped
    interval           epochs between decisions, counted from n_warmup_epochs; the first report in each decides
    n_min_trials       complete trials that must have a value at the epoch

    Decides like optuna.pruners.MedianPruner, with epochs as its steps.
    """

    name: Literal["median"] = "median"

    def bound(self, losses: Sequence[float]) -> tuple[str, float]:
        return "median", median(losses)
