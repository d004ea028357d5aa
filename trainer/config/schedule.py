"""`train.schedule`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config.fields import Frozen, Mode, NonNegative, Share


class OneCycleConfig(Frozen):
    """The one-cycle policy: lr/div_factor up to lr, then down to lr/(div_factor * final_div_factor)."""

    pct_start: Share = 0.3  # the rise's share of all steps, where schedule.warmup_* sets none
    div_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 25.0
    final_div_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1e4


class PlateauConfig(Frozen):
    """Multiply the learning rate by `factor` once `monitor` has not improved for more than `patience` epochs."""

    monitor: str = "train/loss"
    mode: Mode = "min"
    patience: Annotated[int, Field(ge=0)] = 10
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    threshold: NonNegative = 1e-4  # relative improvement that counts
    min_lr: NonNegative = 1e-6


class ScheduleConfig(Frozen):
    """The learning rate as a function of the step. Give at most one of the three lengths of the warmup."""

    name: Literal["constant", "cosine", "one_cycle", "plateau"] = "constant"
    warmup: Literal["linear"] = "linear"
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    warmup_ratio: Share | None = None  # of all steps
    warmup_epochs: NonNegative | None = None
    min_lr: NonNegative = 0.0  # cosine: where it ends
    one_cycle: OneCycleConfig = OneCycleConfig()
    plateau: PlateauConfig = PlateauConfig()

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        lengths = ("warmup_steps", "warmup_ratio", "warmup_epochs")
        given = [name for name in lengths if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} both set the length of the warmup: give one of them.")
        return self
