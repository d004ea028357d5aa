"""Successive halving by stopping (Jamieson and Talwalkar 2016, "Non-stochastic Best Arm Identification")."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpo.search.strategies.asha import Asha
from hpo.search.strategies.base import History
from trainer.report import Verdict


class Halving(Asha):
    """Rungs as ASHA has them, which a trial passes only once enough trials have come to it.

    eta, min_epochs, max_epochs   as in ASHA; the first rung is at min_epochs * eta^early_stopping_rate
    early_stopping_rate           s of the paper on ASHA: how many of the lowest rungs are left out
    bootstrap                     trials that stop at a rung before any other may pass it

    The paper stops a rung's losers once all of its round are there. Here a trial is held against those that came before
    it, so that nothing pauses: the more `bootstrap` asks for, the nearer to a round, and the more is stopped unseen.
    Decides as optuna.pruners.SuccessiveHalvingPruner does where every epoch is reported.
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
