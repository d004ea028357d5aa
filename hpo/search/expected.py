"""Estimates the value that the best of many noisy trials is expected to have on new data.

The best value of a search is partly luck, and the more so the larger the noise of a value is beside the differences of
the trials. Let a value be x = t + e, where e is normal with the deviation `noise`. The distribution of the true values
t near the best is estimated without a form of its own: the weights of a grid that make the values likeliest (Kiefer and
Wolfowitz 1956, "Consistency of the Maximum Likelihood Estimator in the Presence of Infinitely Many Incidental
Parameters"), by expectation maximization (Koenker and Mizera 2014, "Convex Optimization, Shape Constraints, and
Compound Decisions", JASA). The mean of t given the best x is its expected value (Efron 2011, "Tweedie's Formula and
Selection Bias", JASA). The mean rises with x where all values have one noise, so the best trial stays the best.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from operator import mul
from statistics import fmean

from hpo.search.spread import Spread, seeds_needed

LAST = 6  # values at the end of a curve that show its scatter
FEWEST = 10  # differences from which the scatter is estimated
REACH, STEP = 8.0, 0.2  # of the noise: the extent of the grid above the best value, and the distance of its points
ROUNDS = 100  # of expectation maximization
TOLD = 1.96  # deviations by which two values differ that are told apart
ROUNDING = 1e-12  # of the largest value: a scatter below it is that of float64 arithmetic


def scatter(curves: Sequence[Sequence[float]]) -> float | None:
    """Returns the deviation of the last values of some curves about their trends; None for too few values.

    The k-th differences of independent values have a variance of binomial(2k, k) times theirs. Second differences are
    free of a linear trend and third ones of a quadratic trend, so the smaller estimate contains less of the trend.
    Rounding alone gives 0.
    """
    estimates: list[float] = []
    ends = [curve[-LAST:] for curve in curves if all(map(math.isfinite, curve[-LAST:]))]
    for order in (2, 3):
        differences = [difference for end in ends for difference in _differences(end, order)]
        if len(differences) >= FEWEST:
            estimates.append(math.sqrt(fmean(d * d for d in differences) / math.comb(2 * order, order)))
    return _above_rounding(min(estimates), ends) if estimates else None


def _above_rounding(noise: float, curves: Sequence[Sequence[float]]) -> float:
    return noise if noise > ROUNDING * max(abs(value) for curve in curves for value in curve) else 0.0


def _differences(values: Sequence[float], order: int) -> Sequence[float]:
    for _ in range(order):
        values = [after - before for before, after in pairwise(values)]
    return values


def parts_scatter(curves: Sequence[Sequence[float]]) -> float | None:
    """Returns the standard error of a trial's mean over its folds or seeds; None for too few values.

    curves  the means over the first 1, 2, ... K parts of each trial; shorter curves do not count

    A part that is hard for every trial changes no difference between trials, so its mean over the trials is subtracted,
    as is the mean of each trial: (n - 1) (K - 1) degrees of freedom are left. Rounding alone gives 0.
    """
    count = max(map(len, curves), default=0)
    whole = [curve for curve in curves if len(curve) == count and all(map(math.isfinite, curve))]
    freedom = (len(whole) - 1) * (count - 1)
    if freedom < FEWEST:
        return None
    sums = [[0.0, *(k * value for k, value in enumerate(curve, 1))] for curve in whole]
    rows = [[after - before for before, after in pairwise(row)] for row in sums]
    columns = [fmean(column) for column in zip(*rows, strict=True)]
    mean = fmean(columns)
    squares = sum(
        (value - fmean(row) - column + mean) ** 2 for row in rows for value, column in zip(row, columns, strict=True)
    )
    return _above_rounding(math.sqrt(squares / freedom / count), whole)


def expected(losses: Sequence[float], noise: float, more: Sequence[float] = ()) -> list[float]:
    """Returns the expected loss on new data of the best trial and of the runner-up, if there is one.

    more  finite losses of `losses`, whose expected ones follow

    Raises ValueError if no loss is finite.
    """
    ranked = sorted(loss for loss in losses if math.isfinite(loss))
    best = min(ranked)
    counts = Counter(round((loss - best) / noise / STEP) for loss in ranked if loss <= best + REACH * noise)
    grid = [STEP * place for place in range(round(REACH / STEP) + 1)]
    likelihoods = [_likelihoods(STEP * place, grid) for place in counts]
    weights = [1 / len(grid)] * len(grid)
    for _ in range(ROUNDS):
        shares = [_share(row, weights) for row in likelihoods]
        weights = [sum(map(mul, counts.values(), column)) / counts.total() for column in zip(*shares, strict=True)]

    def mean(loss: float) -> float:
        if loss > best + REACH * noise:
            return loss
        return best + noise * sum(map(mul, grid, _share(_likelihoods((loss - best) / noise, grid), weights)))

    return [mean(loss) for loss in (*ranked[:2], *more)]


def _likelihoods(value: float, grid: Sequence[float]) -> list[float]:
    return [math.exp(-0.5 * (value - true) ** 2) for true in grid]


def _share(likelihoods: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Returns the probability of each true value, given one noisy value."""
    products = list(map(mul, likelihoods, weights))
    total = sum(products)
    return [product / total for product in products]


def may_tell(apart: float, expected_apart: float, noise: float) -> int | None:
    """Returns how many seeds of two trials may tell which is better; 0 where their values tell it, None for too many.

    apart           the difference of their values, whose deviation is sqrt(2) times the noise
    expected_apart  the difference that is expected on new data
    """
    deviation = math.sqrt(2) * noise
    if apart > TOLD * deviation:
        return 0
    return seeds_needed(Spread(expected_apart, deviation, 1))
