"""Strategies that pause and restart, for which nothing shipped has a use yet."""

from __future__ import annotations

from typing import Literal

from hpo.search.strategies.base import BaseStrategy, History
from trainer.report import CONTINUE, Verdict


class PauseAtOne(BaseStrategy):
    """Every trial pauses at epoch 1."""

    name: Literal["pausing"] = "pausing"

    def wants(self, epoch: int) -> bool:
        return epoch == 1

    def decide(self, history: History) -> Verdict:
        return Verdict("pause", reason="at its rung")


class RestartOne(BaseStrategy):
    """Trial 1 goes on, at epoch 2, from the last checkpoint of trial 0 with other parameters."""

    name: Literal["restarting"] = "restarting"

    def wants(self, epoch: int) -> bool:
        return epoch == 2

    def decide(self, history: History) -> Verdict:
        if history.number != 1:
            return CONTINUE
        params = {"train.optim.lr": 0.005, "train.num_epochs": 6}
        return Verdict("restart_from", reason="exploit", checkpoint=history.checkpoint(0), params=params)
