"""Holds parts that a study may put into the configuration of its data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.fields import Frozen, Positive


class CurriculumConfig(Frozen):
    """Shows the easiest `start` of the samples at first, and all of them after `epochs` epochs."""

    start: Annotated[float, Field(gt=0, le=1)] = 0.2
    epochs: Positive = 5.0
    pacing: Literal["linear", "root", "exponential"] = "linear"
