"""What training and validation curves say: over- or underfitting, a plateau."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

GAP = 0.2  # between validation and training loss, of the validation loss
SLOPE = 0.01  # relative change per epoch below which a curve is flat

Verdict = Literal["overfitting", "underfitting", "plateau", "healthy", "too short"]


@dataclass(frozen=True)
class Fit:
    verdict: Verdict
    gap: float  # (validation - training) / |validation| at the end
    best_epoch: int  # of the validation loss, from 1
    train_slope: float  # relative change per epoch over the last third
    advice: str


def judge(train: Sequence[float], validation: Sequence[float]) -> Fit:
    """The verdict on losses (lower is better) of the same epochs; NaN counts as worst. Needs six epochs."""
    n = min(len(train), len(validation))
    if n < 6:
        return Fit("too short", math.nan, 0, math.nan, "train at least six epochs before judging the curves.")
    best = int(np.nanargmin(validation[:n])) + 1
    last = max(n // 3, 3)
    slope = _slope(train[n - last : n])
    at_end = float(np.median(validation[n - last : n]))
    gap = (at_end - float(np.median(train[n - last : n]))) / max(abs(at_end), 1e-12)
    risen = (at_end - validation[best - 1]) / max(abs(validation[best - 1]), 1e-12)
    if best <= n - last and risen > SLOPE * last and gap > GAP / 2:
        return Fit(
            "overfitting",
            gap,
            best,
            slope,
            f"the validation loss has risen since epoch {best}: stop there "
            "(train.early_stopping.monitor), or raise dropout or train.optim.weight_decay.",
        )
    if slope < -SLOPE:
        return Fit(
            "underfitting",
            gap,
            best,
            slope,
            "the training loss still falls: raise train.num_epochs, train.optim.lr or the model's size.",
        )
    if gap > GAP:
        return Fit(
            "overfitting",
            gap,
            best,
            slope,
            f"the validation loss lies {gap:.0%} above the training loss: "
            "more data or augmentation, dropout, or train.optim.weight_decay.",
        )
    if abs(slope) <= SLOPE and best < n - last:
        return Fit(
            "plateau",
            gap,
            best,
            slope,
            f"nothing has improved since epoch {best}: "
            "train.schedule.name=plateau lowers the learning rate there, or stop.",
        )
    return Fit("healthy", gap, best, slope, "nothing to change.")


def _slope(values: Sequence[float]) -> float:
    """Of the least-squares line, per epoch, relative to the mean."""
    y = np.asarray(values, dtype=np.float64)
    x = np.arange(len(y)) - (len(y) - 1) / 2
    return float((x * (y - y.mean())).sum() / (x * x).sum() / max(abs(y.mean()), 1e-12))
