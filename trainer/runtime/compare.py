"""Compares two values of a metric."""

from __future__ import annotations

import math

from trainer.config import Mode


def improved(value: float, best: float | None, mode: Mode, margin: float = 0.0) -> bool:
    """Whether `value` beats `best` by more than `margin`. What is not finite never does; anything else beats None."""
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value < best - margin if mode == "min" else value > best + margin
