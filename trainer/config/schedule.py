"""Holds `train.schedule`: the learning rate's warmup and decay.

A field that is None takes the default that `OWN_FIELDS` has for the chosen schedule.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from trainer.config.fields import PATTERN, Beta, Frozen, Mode, NonNegative, Positive, Share, added

AtLeastOne = Annotated[float, Field(ge=1, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=0, le=1)]


class OneCycleConfig(Frozen):
    """The one-cycle policy: lr/div_factor up to lr, then down to lr/(div_factor * final_div_factor)."""

    pct_start: Share = 0.3  # the rise's share of all steps, unless schedule.warmup_* sets it
    div_factor: AtLeastOne = 25.0
    final_div_factor: AtLeastOne = 1e4
    momentum: tuple[Beta, Beta] | None = added(None)  # falls from the second to the first and back

    @model_validator(mode="after")
    def _momentum_rises(self) -> OneCycleConfig:
        if self.momentum is not None and self.momentum[0] > self.momentum[1]:
            low, high = self.momentum
            raise ValueError(f"momentum is {[low, high]}: give the lower one, of the highest rate, first.")
        return self


class PlateauConfig(Frozen):
    """Multiplies the learning rate by `factor` once `monitor` has not improved for more than `patience` epochs."""

    monitor: str = "train/loss"
    mode: Mode = "min"
    patience: Annotated[int, Field(ge=0)] = 10
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    threshold: NonNegative = 1e-4  # relative improvement that counts
    min_lr: NonNegative = 1e-6


# The fields that each schedule reads, with their defaults, besides those of the warmup and the batch size rule. A
# default of None depends on the run: see the field.
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "constant": {},
    "cosine": {"min_lr": 0.0},
    "cosine_restarts": {"min_lr": 0.0, "num_cycles": 3, "cycle_mult": 2.0},
    "one_cycle": {"one_cycle": OneCycleConfig()},
    "polynomial": {"min_lr": 0.0, "power": 1.0},
    "linear": {"min_lr": 0.0},
    "exponential": {"min_lr": 0.0, "gamma": 0.95},
    "step": {"min_lr": 0.0, "gamma": 0.1, "step_size": None},
    "multi_step": {"min_lr": 0.0, "gamma": 0.1, "milestones": None},
    "inverse_sqrt": {"min_lr": 0.0, "timescale": None},
    "wsd": {"min_lr": 0.0, "decay_ratio": 0.2, "decay_shape": "sqrt"},
    "cyclical": {"min_lr": None, "num_cycles": 3, "cycle_mode": "triangular", "gamma": 0.95},
    "plateau": {"plateau": PlateauConfig()},
}
OWN_FUNCTION: dict[str, Any] = {"min_lr": 0.0, "options": {}}
WARMUPS = Literal["linear", "cosine", "polynomial", "exponential"]


def _known(name: str) -> str:
    if name in OWN_FIELDS or re.fullmatch(PATTERN, name):
        return name
    raise ValueError(f"choose one of {', '.join(OWN_FIELDS)}, or name a function of yours, 'package.module:function'.")


class ScheduleConfig(Frozen):
    """The learning rate as a function of the step. Give at most one of the three lengths of the warmup."""

    name: Annotated[str, AfterValidator(_known)] = "constant"
    warmup: WARMUPS = "linear"
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    warmup_ratio: Share | None = None  # of all steps
    warmup_epochs: NonNegative | None = None
    warmup_power: Positive | None = None  # of a polynomial warmup; None: 2
    warmup_start: Factor | None = None  # the factor that an exponential warmup starts from; None: 0.01
    scale_lr: Literal["none", "linear", "sqrt"] = "none"  # with batch_size / base_batch_size
    base_batch_size: Annotated[int, Field(ge=1)] | None = None  # the batch size that optim.lr is meant for; None: 256
    min_lr: NonNegative | None = None  # the final or lowest rate; cyclical's None: lr/4
    power: Positive | None = None
    gamma: Factor | None = None  # the factor: at each step, or per epoch of exponential and of exp_range
    step_size: Positive | None = None  # epochs between two steps; None: a third of the run
    milestones: Annotated[tuple[NonNegative, ...], Field(min_length=1)] | None = None  # epochs; None: 1/2, 3/4 of them
    num_cycles: Annotated[int, Field(ge=1, le=1000)] | None = None
    cycle_mult: Annotated[float, Field(ge=1, le=10)] | None = None  # length of a cycle over that of the one before
    cycle_mode: Literal["triangular", "triangular2", "exp_range"] | None = None
    timescale: Positive | None = None  # steps; None: those of the warmup
    decay_ratio: Factor | None = None  # the final decay's share of all steps
    decay_shape: Literal["sqrt", "linear", "cosine"] | None = None
    options: dict[str, float] | None = None  # options of your own function
    one_cycle: OneCycleConfig = OneCycleConfig()
    plateau: PlateauConfig = PlateauConfig()

    @property
    def cycles_momentum(self) -> bool:
        """Returns True if the schedule sets the momentum at each step."""
        return self.name == "one_cycle" and self.one_cycle.momentum is not None

    @property
    def own_fields(self) -> dict[str, Any]:
        """Returns the fields that the chosen schedule reads, with their defaults."""
        return OWN_FIELDS.get(self.name, OWN_FUNCTION)

    def own(self, field: str) -> Any:
        """Returns the value of one of `own_fields`: the one set, else its default."""
        value = getattr(self, field)
        return self.own_fields[field] if value is None else value

    @model_validator(mode="after")
    def _one_length_of_the_warmup(self) -> ScheduleConfig:
        lengths = ("warmup_steps", "warmup_ratio", "warmup_epochs")
        lengths_set = [name for name in lengths if getattr(self, name) is not None]
        if len(lengths_set) > 1:
            raise ValueError(f"{' and '.join(lengths_set)} both set the length of the warmup: give one of them.")
        return self

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> ScheduleConfig:
        """Refuses a value other than the default of a field that the chosen schedule does not read."""
        nested = {"one_cycle": OneCycleConfig(), "plateau": PlateauConfig()}
        belong = {name for fields in (*OWN_FIELDS.values(), OWN_FUNCTION) for name in fields}
        for field in sorted(belong - self.own_fields.keys()):
            if (value := getattr(self, field)) != nested.get(field):
                shown = f"{field}={value!r}" if field not in nested else f"{field}.*"
                names = ", ".join(self.own_fields) or "none"
                raise ValueError(f"{shown} is not read by {self.name}, whose own fields are {names}: leave it out.")
        if self.name == "cyclical" and self.gamma is not None and self.cycle_mode != "exp_range":
            raise ValueError("gamma is read only with cycle_mode=exp_range: set that, or leave gamma out.")
        if self.name == "one_cycle" and self.warmup != "linear":
            raise ValueError(f"warmup={self.warmup} does not apply to one_cycle, whose rise is a cosine: leave it out.")
        return self

    @model_validator(mode="after")
    def _milestones_increase(self) -> ScheduleConfig:
        if self.milestones is not None and list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(f"milestones {list(self.milestones)} must increase: sort them, each once.")
        return self
