"""Holds the expected value of the best of noisy trials against values whose truth is known."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpo.search.expected import REACH, expected, may_tell, parts_scatter, scatter

LOSSES = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12)


@pytest.mark.parametrize("trend", [lambda e: 0 * e, lambda e: 3 - 0.2 * e, lambda e: 0.05 * (e - 9) ** 2])
def test_the_scatter_is_that_of_the_noise_alone(trend):
    epochs = np.arange(1, 11)
    noise = np.random.default_rng(0).normal(0, 0.01, (200, 10))
    assert scatter((trend(epochs) + noise).tolist()) == pytest.approx(0.01, rel=0.1)


def test_smooth_curves_have_hardly_any_scatter_and_few_values_none():
    assert scatter([[0.5**epoch for epoch in range(12)]] * 10) == pytest.approx(0, abs=0.005)
    assert scatter([[0.1, 0.3, 0.2]] * 9) is None, "nine second differences"
    assert scatter([[0.1, 0.3, 0.2]] * 10) == pytest.approx(0.3 / math.sqrt(6))
    assert scatter([[0.1, math.nan, 0.2]] * 10) is None


def test_curves_on_a_line_have_no_scatter_at_all():
    lines = [[1 - 0.0816 * slope * epoch for epoch in range(1, 10)] for slope in (0.9, 1.0, 0.03)]
    assert scatter(lines) == 0, "what is left is rounding"
    lines[0][-2] += 1e-9
    assert scatter(lines) == pytest.approx(1e-9, rel=0.9)


def test_folds_that_differ_alike_in_every_trial_have_no_scatter_at_all():
    folds = [0.1, 0.7, 0.3]
    means = [[0.37 * trial + sum(folds[:k]) / k for k in (1, 2, 3)] for trial in range(8)]
    assert parts_scatter(means) == 0, "what is left is rounding"


def test_the_scatter_of_folds_leaves_out_that_a_fold_is_hard():
    """Oracle: an analysis of variance by least squares on indicators of trials and folds."""
    own = np.random.default_rng(1).normal(0, 1, (8, 5)) + 10 * np.arange(5) + 3 * np.arange(8)[:, None]
    means = np.cumsum(own, axis=1) / np.arange(1, 6)
    trials, folds = np.repeat(np.eye(8), 5, axis=0), np.tile(np.eye(5), (8, 1))
    squares = np.linalg.lstsq(np.hstack([trials, folds[:, 1:]]), own.ravel(), rcond=None)[1][0]
    assert parts_scatter([*means.tolist(), [1.0, 2.0]]) == pytest.approx(math.sqrt(squares / (7 * 4) / 5))
    assert parts_scatter(means[:3].tolist()) is None, "eight degrees of freedom"


@pytest.mark.parametrize("noise", [0.1, 0.3, 1.0])
def test_the_expected_value_is_free_of_the_winners_luck(noise):
    """True losses have a heavy upper tail; the best of 50 noisy ones is lucky by half to two deviations."""
    rng, luck, errors = np.random.default_rng(2), [], []
    for _ in range(40):
        truth = rng.gamma(2.0, 0.3, 50) + rng.exponential(1.0, 50) * (rng.random(50) < 0.2)
        losses = truth + noise * rng.standard_normal(50)
        best = losses.argmin()
        luck.append((losses[best] - truth[best]) / noise)
        errors.append((expected(losses.tolist(), noise)[0] - truth[best]) / noise)
    assert np.mean(luck) < -0.4 and abs(np.mean(errors)) < abs(np.mean(luck)) / 2
    assert math.sqrt(np.mean(np.square(errors))) < 1.2, "so the noise is its error"


@given(LOSSES, st.floats(0.01, 10))
def test_the_best_stays_first_and_is_expected_no_better_than_it_was(losses, noise):
    values, best = expected([*losses, math.inf, math.nan], noise), min(losses)
    assert len(values) == min(len(losses), 2) and values == sorted(values)
    assert best - 1e-9 <= values[0] <= best + REACH * noise


def test_seeds_are_needed_where_two_values_differ_by_their_noise():
    assert may_tell(3.0, 2.5, 1.0) == 0, "more than 1.96 times sqrt(2)"
    assert may_tell(2.0, 0.01, 1.0) is None
    assert may_tell(2.0, 1.5, 1.0) == 6, (
        "t(5, .975) sqrt(2) / sqrt(6) = 1.484, and t(4, .975) sqrt(2) / sqrt(5) = 1.756"
    )
