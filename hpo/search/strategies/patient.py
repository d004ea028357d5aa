"""Patience before another strategy is asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from hpo.errors import UserError
from hpo.search.population.base import breeding
from hpo.search.promotion.base import promoting
from hpo.search.strategies.base import History, Strategy, make_strategy
from trainer.report import CONTINUE, Json, Verdict


class Patient(BaseModel):
    """Ask another strategy only about a trial that has stopped getting better.

    strategy    the other one, a name or `{"name": ..., option: value}`; None stops on its own, which is early stopping
    patience    reports, besides the newest, that may pass without a new best loss
    min_delta   by how much the losses before them must be better for that to count

    Losses that are not finite are passed over. Decides as optuna.pruners.PatientPruner does. A strategy that decides at
    rungs is not asked again for a rung that it was not asked at in time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["patient"] = "patient"
    strategy: dict[str, Any] | None = Field(default_factory=lambda: _spec("median"))
    patience: int = Field(default=3, ge=0)
    min_delta: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)

    @field_validator("strategy", mode="before")
    @classmethod
    def _spelled_out(cls, given: Json) -> Any:
        if not isinstance(given, str | Mapping):
            return given
        if promoting(given) or breeding(given):
            raise UserError(f"strategy 'patient' cannot ask {_spec(given)['name']!r}: its trials pause; give another.")
        return _spec(given)

    @cached_property
    def _asked(self) -> Strategy | None:
        return None if self.strategy is None else make_strategy(self.strategy)

    def wants(self, epoch: int) -> bool:
        return self._asked is None or self._asked.wants(epoch)

    def decide(self, history: History) -> Verdict:
        losses = [loss for _, loss in history.curve]
        split = len(losses) - self.patience - 1
        before = min((loss for loss in losses[: max(split, 0)] if not math.isnan(loss)), default=math.nan)
        after = min((loss for loss in losses[max(split, 0) :] if not math.isnan(loss)), default=math.nan)
        if not before + self.min_delta < after:
            return CONTINUE
        if self._asked is not None:
            return self._asked.decide(history)
        return Verdict("stop", reason=f"best loss {before:g} was not met again in {self.patience + 1} reports")


def _spec(given: str | Mapping[str, Any]) -> dict[str, Any]:
    return make_strategy(given).model_dump()
