"""Holds `train.precision`: the number format of a forward pass; trainer/model/precision.py applies it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.fields import Frozen, Positive

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"]  # auto: bf16 on a GPU that has it, else fp32


class LossScaleConfig(Frozen):
    """The factor of fp16's loss: it starts at `init` and, if `dynamic`, halves at overflows and doubles again."""

    init: Positive = 65536.0
    dynamic: bool = True
    growth_interval: Annotated[int, Field(ge=1)] = 2000  # steps without an overflow before it doubles
