"""Forecasts how much the best value of a study will improve over its next trials.

The best of n random draws approaches the optimum as n ** (-1 / k), where k is half the number of hyperparameters that
matter near the optimum (Lourie, He and Cho 2025, "Hyperparameter Loss Surfaces Are Simple Near their Optima", eq. 4);
k = 2 stands for four of them. So the gain of m trials after n is about

    base(n, m) = spread * n ** (-1/2) * (1 - (1 + m / n) ** (-1/2))

where the spread is the distance from the best loss to the QUANTILE of the losses, and at least FLOOR times the distance
to their median, since equal losses at the top say little. The expected gain and its bound are multiples of `base` that
were measured on replayed studies (`bench/forecast.py`) by split conformal prediction (Lei et al. 2018,
"Distribution-Free Predictive Inference for Regression", JASA). So the bound assumes nothing about the distribution of
the values, only that the study resembles the replayed ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

HORIZON = 20  # trials
FEWEST = 10  # trials with a value, and
FEWEST_COMPLETE = 3  # complete ones, from which a forecast is made
COVERED = 0.9  # the share of studies whose gain is at most `Forecast.most`
QUANTILE, FLOOR = 0.2, 0.1
MEAN, MOST = 3.2, 15.0  # of `base`, by `bench/forecast.py --half choose`


class Seen(NamedTuple):
    """The loss of an ended trial, and whether the trial is complete; a stopped trial has its last loss."""

    loss: float
    complete: bool


@dataclass(frozen=True)
class Forecast:
    """The expected improvement by the next trials.

    trials  their number
    gain    the expected improvement of the best value, at least 0
    most    the bound that the improvement does not exceed with a probability of COVERED
    """

    trials: int
    gain: float
    most: float


def forecast(seen: Sequence[Seen], trials: int = HORIZON) -> Forecast | None:
    """Returns the forecast for the next `trials` trials after the `seen` ones; None if too few were seen."""
    losses = [trial.loss for trial in seen if math.isfinite(trial.loss)]
    complete = [trial.loss for trial in seen if trial.complete and math.isfinite(trial.loss)]
    if len(losses) < FEWEST or len(complete) < FEWEST_COMPLETE:
        return None
    best = min(complete)
    near, half = (max(_quantile(sorted(losses), share) - best, 0.0) for share in (QUANTILE, 0.5))
    base = max(near, FLOOR * half) * len(losses) ** -0.5 * (1 - (1 + trials / len(losses)) ** -0.5)
    return Forecast(trials, MEAN * base, MOST * base)


def _quantile(ascending: Sequence[float], share: float) -> float:
    """Returns the quantile by linear interpolation, as `numpy.quantile` does."""
    position = share * (len(ascending) - 1)
    below = ascending[int(position)]
    return below + (position % 1) * (ascending[math.ceil(position)] - below)
