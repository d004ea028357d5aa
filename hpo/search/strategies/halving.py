"""Implements successive halving by stopping (Jamieson and Talwalkar 2016, "Non-stochastic Best Arm Identification")."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpo.search.strategies.asha import Asha
from hpo.search.strategies.base import History
from trainer.report import Verdict


class Halving(Asha):
    """Sets rungs as ASHA does; a trial passes a rung only once enough trials have reached it.

    eta, min_epochs, max_epochs   as in ASHA; the first rung is at min_epochs * eta^early_stopping_rate
    early_stopping_rate           s of the ASHA paper: how many of the lowest rungs are skipped
    bootstrap                     trials that stop at a rung before any other may pass it

    The paper stops the losers of a rung once the whole round has reached it. Here nothing pauses: a trial is compared
    with those that reached the rung earlier. A larger `bootstrap` is closer to a round, but stops more trials without a
    comparison. Decides like optuna.pruners.SuccessiveHalvingPruner if every epoch is reported.
    """

    name: Literal["halving"] = "halving"  # pyright: ignore[reportIncompatibleVariableOverride]
    min_epochs: int = Field(default=1, ge=1)
    eta: int = Field(default=4, ge=2)
    early_stopping_rate: int = Field(default=0, ge=0)
    bootstrap: int = Field(default=0, ge=0)

    @property
    def first(self) -> int:
        return self.min_epochs * self.eta**self.early_stopping_rate

    def judge(self, history: History, rung: int) -> Verdict:
        others = len(history.at(history.epoch))
        if others < self.bootstrap:
            return Verdict(
                "stop", reason=f"rung {rung} (epoch {history.epoch}) has seen {others} of {self.bootstrap} trials"
            )
        return super().judge(history, rung)
