"""Consults another strategy only about trials that have stopped improving."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from pydantic import Field, field_validator

from hpo.errors import UserError
from hpo.search.population.base import breeding
from hpo.search.promotion.base import promoting
from hpo.search.strategies.base import BaseStrategy, History, Strategy
from hpo.search.strategies.registry import make_strategy
from trainer.report import CONTINUE, Json, Verdict


class Patient(BaseStrategy):
    """Consults another strategy only about a trial that has stopped improving.

    strategy    the other strategy, a name or `{"name": ..., option: value}`; None: stop, which is early stopping
    patience    reports, besides the newest, that may pass without a new best loss
    min_delta   the margin by which the losses before them must be better for that to count

    Ignores losses that are not finite. Decides like optuna.pruners.PatientPruner. A strategy that decides at rungs is
    not consulted later about a rung that passed while this class waited.
    """

    name: Literal["patient"] = "patient"
    strategy: dict[str, Any] | None = Field(default_factory=lambda: _spec("median"))
    patience: int = Field(default=3, ge=0)
    min_delta: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)

    @field_validator("strategy", mode="before")
    @classmethod
    def _spelled_out(cls, value: Json) -> Any:
        if not isinstance(value, str | Mapping):
            return value
        if promoting(value) or breeding(value):
            raise UserError(f"strategy 'patient' cannot ask {_spec(value)['name']!r}: its trials pause; give another.")
        return _spec(value)

    @cached_property
    def _inner(self) -> Strategy | None:
        return None if self.strategy is None else make_strategy(self.strategy)

    def wants(self, epoch: int) -> bool:
        return self._inner is None or self._inner.wants(epoch)

    def decide(self, history: History) -> Verdict:
        losses = [loss for _, loss in history.curve]
        split = len(losses) - self.patience - 1
        before = min((loss for loss in losses[: max(split, 0)] if not math.isnan(loss)), default=math.nan)
        after = min((loss for loss in losses[max(split, 0) :] if not math.isnan(loss)), default=math.nan)
        if not before + self.min_delta < after:
            return CONTINUE
        if self._inner is not None:
            return self._inner.decide(history)
        return Verdict("stop", reason=f"best loss {before:g} was not met again in {self.patience + 1} reports")


def _spec(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    return make_strategy(spec).model_dump()
