"""Averages of the weights over training; how they are taken is in trainer/model/averaging.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.fields import Frozen, Share


class AverageConfig(Frozen):
    """Evaluate, and save beside the trained weights, an average of them: exponential (ema) or plain (swa)."""

    name: Literal["none", "ema", "swa"] = "none"
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.999  # ema: what the average keeps at a step
    start: Share = 0.75  # swa: after this share of all steps
    every_steps: Annotated[int, Field(ge=1)] = 1  # optimizer steps between two weights that enter it
