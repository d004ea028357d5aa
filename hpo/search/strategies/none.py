"""Holds the strategy that stops no trial."""

from __future__ import annotations

from typing import ClassVar, Literal

from hpo.search.strategies.base import BaseStrategy, History
from trainer.report import CONTINUE, Verdict


class NoStrategy(BaseStrategy):
    """Lets every trial run to its end."""

    several: ClassVar[bool] = True
    name: Literal["none"] = "none"

    def wants(self, epoch: int) -> bool:
        return False

    def decide(self, history: History) -> Verdict:
        return CONTINUE
