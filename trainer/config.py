"""What a training run is told: `TrainConfig` and its parts. Torch-free; the driver imports it.

Every field has a dotted path (`train.optim.lr`). A field that is None takes the default its comment names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Mode = Literal["min", "max"]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Frozen(BaseModel):
    """A part of the configuration: immutable, and every field is known."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class OptimConfig(Frozen):
    """The optimizer. Norms and biases (parameters of fewer than two dimensions) are never decayed."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Positive | None = None  # None: adamw 1e-3, sgd 0.1
    weight_decay: NonNegative | None = None  # None: adamw 0.01, sgd 1e-4
    momentum: Beta = 0.9  # sgd
    nesterov: bool = False  # sgd
    betas: tuple[Beta, Beta] | None = None  # adamw; None: (0.9, 0.999)
    eps: Positive = 1e-8  # adamw

    @model_validator(mode="after")
    def _check(self) -> OptimConfig:
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("nesterov is true but momentum is 0: set momentum above 0, or nesterov to false.")
        return self


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


class ClipConfig(Frozen):
    """Clipping of the window's gradient, after its division by the window's count. None: not clipped."""

    norm: Positive | None = 1.0
    value: Positive | None = None


class EarlyStoppingConfig(Frozen):
    """End, as complete, once `monitor` has not improved by `min_delta` for `patience` epochs. None: never."""

    monitor: str | None = None
    mode: Mode = "min"
    patience: Annotated[int, Field(ge=1)] = 10
    min_delta: NonNegative = 0.0


class GuardConfig(Frozen):
    """Steps whose loss or gradient is not finite never reach the weights; this many in a row end the fit."""

    max_consecutive: Annotated[int, Field(ge=1)] = 10


class CheckpointConfig(Frozen):
    """When to save, and what to keep: the last ones, and the best by `monitor` (None: no best)."""

    every_epochs: Annotated[int, Field(ge=1)] | None = 1
    every_steps: Annotated[int, Field(ge=1)] | None = None
    keep_last: Annotated[int, Field(ge=1)] = 2
    keep_best: Annotated[int, Field(ge=0)] = 1
    monitor: str | None = None
    mode: Mode = "min"


class TrainConfig(Frozen):
    """All of a training run but its model and its data."""

    num_epochs: Annotated[int, Field(ge=1)] = 10
    batch_size: Annotated[int, Field(ge=1)] = 32  # samples of one optimizer step
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None  # samples of one forward pass; None: batch_size
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    num_threads: Annotated[int, Field(ge=1)] = 1  # intra-op; another number gives other weights
    num_workers: Annotated[int, Field(ge=0)] = 0  # loader processes; any number gives the same weights
    precision: Literal["fp32", "bf16"] = "fp32"
    deterministic: bool = True
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    resume_from: Path | None = None  # a checkpoint directory to start from, where the trial has none of its own
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    clip: ClipConfig = ClipConfig()
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
