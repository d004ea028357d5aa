"""Holds `train.rollback`: the response to a loss spike; trainer/gradients/loss_spikes.py implements it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from trainer.config.fields import Frozen, Positive


class RollbackConfig(Frozen):
    """Rolls weights and optimizer back to the last scheduled checkpoint when a window's loss jumps.

    It reads the loss at every step, which waits for the GPU.
    """

    enabled: bool = False
    threshold: Positive = 8.0  # robust z-score above which a loss is a jump
    window: Annotated[int, Field(ge=2)] = 64  # recent windows that it is measured against
    min_history: Annotated[int, Field(ge=2)] = 16  # of them, before anything is judged
    lr_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    cooldown: Annotated[int, Field(ge=0)] = 50  # steps at the cut learning rate
    max_rollbacks: Annotated[int, Field(ge=1)] = 5  # one more and the trial is infeasible

    @model_validator(mode="after")
    def _check(self) -> RollbackConfig:
        if self.min_history > self.window:
            raise ValueError(f"min_history is {self.min_history} but window only {self.window}: lower min_history.")
        return self
