"""The median stopping rule (Golovin et al. 2017, "Google Vizier", section 3.2.2, in optuna's form)."""

from __future__ import annotations

import math
from statistics import median
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from hpo.search.strategy import History
from trainer.report import CONTINUE, Verdict


class Median(BaseModel):
    """Stop a trial whose best loss so far is above the median loss of the complete trials at the same epoch.

    n_startup_trials   complete trials before anything is stopped
    n_warmup_epochs    epochs no trial is stopped in
    interval           epochs between decisions, counted from n_warmup_epochs; the first report in each decides
    n_min_trials       complete trials that must have a value at the epoch

    Decides as optuna.pruners.MedianPruner does, its steps being epochs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["median"] = "median"
    n_startup_trials: int = Field(default=5, ge=0)
    n_warmup_epochs: int = Field(default=0, ge=0)
    interval: int = Field(default=1, ge=1)
    n_min_trials: int = Field(default=1, ge=1)

    def wants(self, epoch: int) -> bool:
        return epoch >= self.n_warmup_epochs

    def decide(self, history: History) -> Verdict:
        epoch, curve = history.epoch, history.curve
        if not self.wants(epoch):
            return CONTINUE
        boundary = epoch - (epoch - self.n_warmup_epochs) % self.interval
        if len(curve) > 1 and curve[-2][0] >= boundary:
            return CONTINUE  # decided already in this interval
        complete = history.curves(("complete",))
        if not complete or len(complete) < self.n_startup_trials:
            return CONTINUE
        best = min((loss for _, loss in curve if not math.isnan(loss)), default=math.nan)
        if math.isnan(best):
            return Verdict("stop", reason=f"no finite loss up to epoch {epoch}")
        at_epoch = [loss for other in complete.values() for reached, loss in other if reached == epoch]
        finite = [loss for loss in at_epoch if not math.isnan(loss)]
        if len(at_epoch) < self.n_min_trials or not finite:
            return CONTINUE
        if best > (middle := median(finite)):
            return Verdict(
                "stop",
                reason=f"best loss {best:g} is above the median {middle:g} of {len(finite)} trials at epoch {epoch}",
            )
        return CONTINUE
