"""Holds `train.average`: averages of the weights over training; trainer/model/averaging.py computes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.fields import Frozen, Share


class AverageConfig(Frozen):
    """Evaluates, and saves with the trained weights, an average of them: exponential (ema) or plain (swa)."""

    name: Literal["none", "ema", "swa"] = "none"
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.999  # ema: the share that the average keeps at a step
    start: Share = 0.75  # swa: after this share of all steps
    every_steps: Annotated[int, Field(ge=1)] = 1  # optimizer steps between two weights that enter it
