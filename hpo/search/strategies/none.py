"""No early stopping."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from hpo.search.strategies.base import History
from trainer.report import CONTINUE, Verdict


class NoStrategy(BaseModel):
    """Every trial runs to its end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    several: ClassVar[bool] = True
    name: Literal["none"] = "none"

    def wants(self, epoch: int) -> bool:
        return False

    def decide(self, history: History) -> Verdict:
        return CONTINUE
