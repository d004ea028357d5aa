"""Defines the base of strategies that decide at intervals of epochs."""

from __future__ import annotations

from pydantic import Field

from hpo.search.strategies.base import BaseStrategy, History


class IntervalStrategy(BaseStrategy):
    """Decides at the first report of each `interval` epochs, counted from `n_warmup_epochs`."""

    n_warmup_epochs: int = Field(default=0, ge=0)
    interval: int = Field(default=1, ge=1)

    def wants(self, epoch: int) -> bool:
        return epoch >= self.n_warmup_epochs

    def due(self, history: History) -> bool:
        """Returns whether this report is the first of its interval."""
        epoch, curve = history.epoch, history.curve
        boundary = epoch - (epoch - self.n_warmup_epochs) % self.interval
        return self.wants(epoch) and (len(curve) < 2 or curve[-2][0] < boundary)
