"""The metric block against scipy and numpy, and what it does with days that have no answer."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import pearsonr, spearmanr

from studies.atft.metrics import daily_ic, decile_spread, metric_block, newey_west_t, portfolio, weights

RULES = {"min_stocks": 10, "max_undefined": 0.05, "cost": 0.0005}


@pytest.fixture
def panel():
    rng = np.random.default_rng(0)
    returns = np.round(0.02 * rng.standard_normal((60, 40)), 3)
    predictions = np.round(returns + 0.05 * rng.standard_normal(returns.shape), 2)
    predictions[rng.random(returns.shape) < 0.1] = np.nan
    returns[rng.random(returns.shape) < 0.1] = np.nan
    return predictions, returns


def test_daily_correlations_equal_scipy_with_ties_and_gaps(panel):
    predictions, returns = panel
    rank_ic, ic, evaluated = daily_ic(predictions, returns, 10)
    assert evaluated.all()
    for t in range(len(returns)):
        both = np.isfinite(predictions[t]) & np.isfinite(returns[t])
        assert rank_ic[t] == pytest.approx(spearmanr(predictions[t, both], returns[t, both])[0], abs=1e-12)
        assert ic[t] == pytest.approx(pearsonr(predictions[t, both], returns[t, both])[0], abs=1e-12)


@pytest.mark.parametrize("constant", [0.0, 0.3, 1e4])
def test_a_constant_prediction_is_undefined_not_zero(panel, constant):
    predictions, returns = panel
    # Sorted by target, so that argsort(argsort()) would call this a perfect ranking.
    returns = np.sort(returns, axis=1)
    block = metric_block(np.full_like(predictions, constant), returns, returns, 1, **RULES)
    assert block["undefined_days"] == 60
    assert all(np.isnan(block[name]) for name in ("rank_ic", "ic", "icir", "sharpe", "decile_spread"))


def test_few_undefined_days_are_counted_and_many_fail(panel):
    predictions, returns = panel
    predictions[:3] = 0.1
    few = metric_block(predictions, returns, returns, 1, **RULES)
    assert few["undefined_days"] == 3 and few["num_days"] == 60
    assert few["rank_ic"] == pytest.approx(np.nanmean(daily_ic(predictions, returns, 10)[0]))
    predictions[3] = np.nan
    many = metric_block(predictions, returns, returns, 1, **RULES)
    assert many["undefined_days"] == 4 and np.isnan(many["rank_ic"])


def test_days_that_nobody_could_score_do_not_count(panel):
    predictions, returns = panel
    returns[0], returns[1, 9:] = 0.01, np.nan
    block = metric_block(predictions, returns, returns, 1, **RULES)
    assert block["num_days"] == 58 and block["undefined_days"] == 0


def test_newey_west_equals_the_plain_t_without_lags_and_widens_with_them():
    rng = np.random.default_rng(1)
    white = rng.standard_normal(500) + 0.1
    assert newey_west_t(white, 0) == pytest.approx(white.mean() / (white.std() / np.sqrt(500)))
    overlapping = np.convolve(white, np.ones(5) / 5, mode="valid")
    n, d = len(overlapping), overlapping - overlapping.mean()
    variance = d @ d / n + 2 * sum((1 - k / 5) * (d[k:] @ d[:-k]) / n for k in range(1, 5))
    assert newey_west_t(overlapping, 4) == pytest.approx(overlapping.mean() / np.sqrt(variance / n))
    assert abs(newey_west_t(overlapping, 4)) < abs(newey_west_t(overlapping, 0)) / 1.5


def test_weights_are_neutral_and_of_gross_one(panel):
    w = weights(panel[0])
    np.testing.assert_allclose(w.sum(axis=1), 0, atol=1e-12)
    np.testing.assert_allclose(np.abs(w).sum(axis=1), 1)


def test_portfolio_by_hand():
    predictions = np.array([[1.0, -1.0], [-1.0, 1.0], [-1.0, 1.0]])
    returns = np.log1p(np.array([[0.02, 0.0], [0.01, 0.0], [0.0, 0.03]]))
    gross = np.array([0.01, -0.005, 0.015])
    result = portfolio(predictions, returns, 1, cost=0.001)
    net = gross - 0.001 * np.array([1.0, 2.0, 0.0])
    assert result["turnover"] == pytest.approx(1.0)
    assert result["sharpe"] == pytest.approx(gross.mean() / gross.std(ddof=1) * np.sqrt(252))
    assert result["sharpe_net"] == pytest.approx(net.mean() / net.std(ddof=1) * np.sqrt(252))
    assert result["max_drawdown"] == pytest.approx(0.007)
    # Over two days the book is the mean of the last two signals: the reversal nets out.
    assert portfolio(predictions, returns, 2, cost=0.0)["turnover"] == pytest.approx((0.5 + 0.5 + 1.0) / 3)


def test_decile_spread_by_hand():
    predictions = np.arange(20.0)[None]
    returns = np.arange(20.0)[None] / 100
    assert decile_spread(predictions, returns) == pytest.approx(0.18)


def test_the_whole_block_equals_its_formulas_in_pandas(panel):
    """Every metric of a horizon of 5 days, written again with pandas and scipy, day by day and stock by stock."""
    predictions, returns = panel
    rng = np.random.default_rng(2)
    tomorrow = np.where(rng.random(returns.shape) < 0.05, np.nan, 0.02 * rng.standard_normal(returns.shape))
    predictions[7] = 0.25  # one undefined day of 60
    block = metric_block(predictions, returns, tomorrow, 5, **RULES)
    p, r, following = (pd.DataFrame(x) for x in (predictions, returns, tomorrow))
    scored = [t for t in p.index if t != 7]
    both = [(p.loc[t], r.loc[t]) for t in scored]
    rank_ic = np.array([a.corr(b, method="spearman") for a, b in both])
    book = p.sub(p.mean(axis=1), axis=0)
    book = book.div(book.abs().sum(axis=1).replace(0, np.inf), axis=0).fillna(0)
    book.loc[7] = 0.0
    held = sum(book.shift(k).fillna(0) for k in range(5)) / 5
    daily = (held * np.expm1(following).fillna(0)).sum(axis=1)
    turnover = held.diff().fillna(held).abs().sum(axis=1)
    net = daily - 0.0005 * turnover
    wealth = np.concatenate([[0.0], net.cumsum()])
    known = [pd.DataFrame({"p": a, "r": b}).dropna().sort_values("p", kind="stable").r for a, b in zip(
        (p.loc[t] for t in scored), (r.loc[t] for t in scored), strict=True)]  # fmt: skip
    d = rank_ic - rank_ic.mean()
    gamma = [(d[k:] * d[: len(d) - k]).sum() / len(d) for k in range(5)]
    want = {
        "rank_ic": rank_ic.mean(),
        "rank_ic_sd": rank_ic.std(ddof=1),
        "icir": rank_ic.mean() / rank_ic.std(ddof=1),
        "rank_ic_positive": (rank_ic > 0).mean(),
        "rank_ic_t": rank_ic.mean()
        / np.sqrt((gamma[0] + 2 * sum((1 - k / 5) * gamma[k] for k in range(1, 5))) / len(d)),
        "ic": np.mean([a.corr(b) for a, b in both]),
        "decile_spread": np.mean([x.iloc[-(len(x) // 10) :].mean() - x.iloc[: len(x) // 10].mean() for x in known]),
        "num_days": 60,
        "undefined_days": 1,
        "sharpe": daily.mean() / daily.std() * np.sqrt(252),
        "sharpe_net": net.mean() / net.std() * np.sqrt(252),
        "turnover": turnover.mean(),
        "max_drawdown": max(wealth[: t + 1].max() - wealth[t] for t in range(len(wealth))),
    }
    assert block.keys() == want.keys()
    for name, value in want.items():
        assert block[name] == pytest.approx(value, rel=1e-9), name
