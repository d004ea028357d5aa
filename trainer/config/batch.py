"""Holds `train.batch_growth`: batches that grow over a run."""

from __future__ import annotations

from bisect import bisect_right
from typing import Annotated

from pydantic import Field, model_validator

from trainer.config.fields import Frozen


class BatchGrowthConfig(Frozen):
    """Multiplies the batch size by `factor` at each of `epochs`, counted from 0.

    This replaces steps of the learning rate by the inverse factor (Smith et al. 2018, arXiv 1711.00489).
    """

    epochs: tuple[Annotated[int, Field(ge=1)], ...] = ()
    factor: Annotated[float, Field(ge=1, le=1000)] = 2.0

    def size(self, first: int, epoch: int) -> int:
        """Returns the samples of a batch in epoch `epoch`, if a batch of epoch 0 has `first`."""
        return round(first * self.factor ** bisect_right(self.epochs, epoch))

    @model_validator(mode="after")
    def _epochs_increase(self) -> BatchGrowthConfig:
        if list(self.epochs) != sorted(set(self.epochs)):
            raise ValueError(f"epochs {list(self.epochs)} must increase: sort them, each once.")
        return self
