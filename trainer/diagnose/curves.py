"""Reads training and validation curves: over- or underfitting, a plateau."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trainer.finding import Finding, unmeasured

GAP = 0.2  # between validation and training loss, of the validation loss
SLOPE = 0.01  # relative change per epoch below which the training loss is flat
LEARNED = 0.01  # of the first epoch's training loss: less does not count as learning
GAIN = 0.01  # of the earlier best validation loss: the least improvement over the last third of the epochs
EPOCHS = 6  # needed to judge
CHECKS = ("over/underfitting", "plateau")


def findings(train: Sequence[float], validation: Sequence[float], epochs: Sequence[int] = ()) -> list[Finding]:
    """Returns the findings on losses (lower is better) of the same `epochs`, by default from 1; NaN counts as worst."""
    n = min(len(train), len(validation))
    epochs = epochs or range(1, n + 1)
    if n < EPOCHS:
        count_clause = f"there {'is' if n == 1 else 'are'} {n}"
        return [unmeasured(check, f"{EPOCHS} epochs are needed to judge by, and {count_clause}") for check in CHECKS]
    if not np.isfinite(train[:n]).all() or not np.isfinite(validation[:n]).any():
        return [unmeasured(check, "the losses are not finite") for check in CHECKS]
    last = max(n // 3, 3)
    return [_fitting(train[:n], validation[:n], epochs, last), _plateau(validation[:n], epochs, last)]


def best(validation: Sequence[float]) -> int:
    """Returns the index of the least loss."""
    return int(np.nanargmin(validation))


def _fitting(train: Sequence[float], validation: Sequence[float], epochs: Sequence[int], last: int) -> Finding:
    n, least, slope = len(train), best(validation), _slope(train[-last:])
    at_end = float(np.median(validation[-last:]))
    gap = (at_end - float(np.median(train[-last:]))) / max(abs(at_end), 1e-12)
    risen = (at_end - validation[least]) / max(abs(validation[least]), 1e-12)
    fallen = (train[0] - min(train)) / max(abs(train[0]), 1e-12)
    figure = (
        f"over the last {last} epochs the validation loss lies {abs(gap):.0%} of itself "
        f"{'above' if gap >= 0 else 'below'} the training loss (overfitting: over {GAP:.0%} above), "
        f"which changes by {slope:+.1%} an epoch (underfitting under {-SLOPE:.0%})"
    )
    if least < n - last and risen > SLOPE * last and gap > GAP / 2:
        advice = (
            f"the validation loss has risen by {risen:.0%} since epoch {epochs[least]}: stop there "
            "(train.early_stopping.monitor), or raise dropout or train.optim.weight_decay."
        )
        return Finding(CHECKS[0], "overfitting", figure, gap, advice)
    if slope < -SLOPE:
        advice = (
            "the training loss still falls: raise train.num_epochs or the model's size, or take the train.optim.lr "
            "that `hpo lr-find` suggests."
        )
        return Finding(CHECKS[0], "underfitting", figure, gap, advice)
    if fallen < LEARNED:
        advice = "nothing is learned: take the train.optim.lr that `hpo lr-find` suggests, or a larger model."
        return Finding(CHECKS[0], "underfitting", f"{figure}, and fell by {fallen:.1%} in all", fallen, advice)
    if gap > GAP:
        advice = "more data or augmentation, more dropout, or a higher train.optim.weight_decay."
        return Finding(CHECKS[0], "overfitting", figure, gap, advice)
    return Finding(CHECKS[0], "healthy", figure, gap)


def _plateau(validation: Sequence[float], epochs: Sequence[int], last: int) -> Finding:
    values = np.where(np.isfinite(validation), validation, math.inf)
    before, after = float(values[:-last].min()), float(values[-last:].min())
    gain = (before - after) / max(abs(before), 1e-12) if math.isfinite(before) else math.inf
    figure = (
        f"the best validation loss fell by {max(gain, 0):.1%} in the last {last} epochs (a plateau under {GAIN:.0%})"
    )
    if gain >= GAIN:
        return Finding(CHECKS[1], "healthy", figure, gain)
    least, before_last = best(validation), len(validation) - last - 1
    best_of_all = f" (the least loss is epoch {epochs[least]}'s)" if least > before_last else ""
    advice = (
        f"little has come since epoch {epochs[min(least, before_last)]}{best_of_all}: stop there "
        "(train.early_stopping.monitor=val/loss), or "
        "lower the learning rate then (train.schedule.name=plateau)."
    )
    return Finding(CHECKS[1], "plateau", figure, gain, advice)


def _slope(values: Sequence[float]) -> float:
    """Returns the slope of the least-squares line, per epoch, relative to the mean."""
    y = np.asarray(values, dtype=np.float64)
    x = np.arange(len(y)) - (len(y) - 1) / 2
    return float((x * (y - y.mean())).sum() / (x * x).sum() / max(abs(y.mean()), 1e-12))
