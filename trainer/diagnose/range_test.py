"""Runs the learning-rate range test (Smith 2017, arXiv 1506.01186, section 3.3).

It trains a few windows at rates that rise from step to step, and finds where the loss falls fastest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

SMOOTHING = 0.9  # of the exponential average of the losses
DIVERGED = 4.0  # times the best smoothed loss
SKIPPED = 5  # first and last steps, where the average has not settled or the loss has turned


@dataclass(frozen=True)
class RangeTest:
    """The smoothed `losses`, one for each of `lrs`, and the rates that they suggest; None if nothing fell.

    `suggestion` is where the losses fall fastest per decade, `cautious` a tenth of the rate of the least loss.
    """

    lrs: list[float]
    losses: list[float]
    suggestion: float | None
    cautious: float | None


def rates(low: float, high: float, steps: int) -> Iterator[float]:
    """Yields `steps` rates from `low` to `high`, both included, evenly spaced in their logarithm."""
    for i in range(steps):
        yield low * (high / low) ** (i / (steps - 1))


def range_test(train: Callable[[float], float], low: float = 1e-7, high: float = 10.0, steps: int = 100) -> RangeTest:
    """Runs the test with `train(lr)`, which trains one window at `lr` and returns its mean loss.

    Ends early once the loss has diverged.
    """
    lrs: list[float] = []
    losses: list[float] = []
    average = 0.0
    for i, lr in enumerate(rates(low, high, steps)):
        loss = train(lr)
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smooth = average / (1 - SMOOTHING ** (i + 1))  # unbiased from the first step on, as Adam's moments are
        if not math.isfinite(smooth) or (i > SKIPPED and smooth > DIVERGED * abs(min(losses))):
            break
        lrs.append(lr)
        losses.append(smooth)
    return RangeTest(lrs, losses, *_suggest(lrs, losses))


def _suggest(lrs: list[float], losses: list[float]) -> tuple[float | None, float | None]:
    lowest = int(np.argmin(losses)) if losses else 0
    inner = slice(SKIPPED, lowest + 1)
    if lowest < 2 * SKIPPED:
        return None, None
    slopes = np.gradient(np.asarray(losses), np.log10(lrs))[inner]
    steepest = int(np.argmin(slopes))
    return (lrs[SKIPPED + steepest] if slopes[steepest] < 0 else None), lrs[lowest] / 10
