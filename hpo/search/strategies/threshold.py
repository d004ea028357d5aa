"""Stops trials whose loss leaves fixed bounds."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from hpo.errors import UserError
from hpo.search.strategies.base import History
from hpo.search.strategies.interval import IntervalStrategy
from trainer.report import CONTINUE, Verdict


class Threshold(IntervalStrategy):
    """Stops a trial whose loss is not finite, below `lower` or above `upper`.

    lower             a loss below it is too good to be true; None sets no bound
    upper             a loss above it is hopeless; None sets no bound
    n_warmup_epochs   epochs in which no trial is stopped
    interval          epochs between decisions, counted from n_warmup_epochs; the first report in each decides

    The loss of a maximised objective is its negative: `upper=-0.6` stops below an accuracy of 0.6. Decides like
    optuna.pruners.ThresholdPruner, with epochs as its steps.
    """

    name: Literal["threshold"] = "threshold"
    lower: float | None = Field(default=None, allow_inf_nan=False)
    upper: float | None = Field(default=None, allow_inf_nan=False)

    @model_validator(mode="after")
    def _ordered(self) -> Threshold:
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise UserError(f"strategy 'threshold': lower={self.lower:g} is above upper={self.upper:g}; swap them.")
        return self

    def decide(self, history: History) -> Verdict:
        if not self.due(history):
            return CONTINUE
        loss, where = history.value, f"at epoch {history.epoch}"
        if not math.isfinite(loss):
            return Verdict("stop", reason=f"the objective is not finite {where}")
        if self.lower is not None and loss < self.lower:
            return Verdict("stop", reason=f"loss {loss:g} is below {self.lower:g} {where}")
        if self.upper is not None and loss > self.upper:
            return Verdict("stop", reason=f"loss {loss:g} is above {self.upper:g} {where}")
        return CONTINUE
