"""Holds the forecast of a study's gain against the law that it is derived from."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpo.search.forecast import FEWEST, FEWEST_COMPLETE, FLOOR, MEAN, MOST, QUANTILE, Seen, forecast

LOSSES = st.lists(st.floats(-1e3, 1e3, width=32), min_size=FEWEST, max_size=40)


def complete(losses):
    return [Seen(loss, complete=True) for loss in losses]


def test_the_gain_is_the_spread_times_the_law():
    """Oracle: by hand. A fifth of the way from 1 to 11 is 3, so the spread is 2; 11 more trials double their number."""
    expected = forecast(complete(range(11, 0, -1)), 11)
    base = 2 / math.sqrt(11) * (1 - 1 / math.sqrt(2))
    assert expected is not None
    assert (expected.trials, expected.gain, expected.most) == pytest.approx((11, MEAN * base, MOST * base))


def test_a_stopped_trial_widens_the_spread_and_is_never_the_best():
    seen = complete([3.0, 4.0, 5.0]) + [Seen(loss, complete=False) for loss in (1.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0)]
    expected = forecast(seen, 10)
    base = (np.quantile([trial.loss for trial in seen], QUANTILE) - 3) / math.sqrt(10) * (1 - 1 / math.sqrt(2))
    assert expected is not None and expected.gain == pytest.approx(MEAN * base)


def test_equal_losses_at_the_top_do_not_end_a_search():
    """Oracle: by hand. The best five of eleven are equal; the median, 6, is 5 from them, of which a tenth counts."""
    expected = forecast(complete([1, 1, 1, 1, 1, 6, 7, 8, 9, 10, 11]), 11)
    base = FLOOR * 5 / math.sqrt(11) * (1 - 1 / math.sqrt(2))
    assert expected is not None and expected.gain == pytest.approx(MEAN * base)


@pytest.mark.parametrize(
    "seen",
    [
        complete(range(FEWEST - 1)),
        complete(range(FEWEST_COMPLETE - 1)) + [Seen(9.0, complete=False)] * FEWEST,
        complete([math.nan] * FEWEST),
    ],
)
def test_too_few_trials_tell_nothing(seen):
    assert forecast(seen) is None


@given(LOSSES, st.integers(1, 100))
def test_more_trials_gain_more_and_the_bound_lies_above(losses, trials):
    less, more = forecast(complete(losses), trials), forecast(complete(losses), 2 * trials)
    assert less is not None and more is not None
    assert 0 <= less.gain <= more.gain and less.gain <= less.most


@given(LOSSES, st.integers(-3, 3), st.integers(-8, 8))
def test_the_unit_and_the_zero_of_the_objective_do_not_matter(losses, power, shift):
    scaled = forecast(complete([2.0**power * (loss + shift) for loss in losses]))
    as_is = forecast(complete(losses))
    assert scaled is not None and as_is is not None
    assert scaled.gain == pytest.approx(2.0**power * as_is.gain, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("hyperparameters", [2, 4])
def test_on_random_search_the_mean_is_near_and_the_bound_holds(hyperparameters):
    """Oracle: losses drawn from F(y) = y ** (hyperparameters / 2), whose next 20 draws are drawn as well."""
    draws = np.random.default_rng(0).random((2000, 60)) ** (2 / hyperparameters)
    gains, expected = [], []
    for row in draws:
        at = forecast(complete(row[:40]), 20)
        assert at is not None
        gains.append(row[:40].min() - row.min())
        expected.append((at.gain, at.most))
    means, bounds = np.array(expected).T
    assert 0.3 < np.mean(gains) / np.mean(means) < 3
    assert np.mean(gains <= bounds) > 0.85
