"""Compares two values of a metric."""

from __future__ import annotations

import math

from trainer.config import Mode


def improved(value: float, best: float | None, mode: Mode, margin: float = 0.0) -> bool:
    """Returns True if `value` beats `best` by more than `margin`. Non-finite values never do; others beat None."""
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value < best - margin if mode == "min" else value > best + margin
