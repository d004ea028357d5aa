"""The synthetic market: the same bytes, a conditional mean that simulation confirms, and the flaws of real data."""

import numpy as np
import pytest

from studies.atft.baseline import rank_ics
from studies.atft.config import MarketConfig
from studies.atft.features import forward_returns, to_grid
from studies.atft.market import BREAK, Dynamics, simulate
from studies.atft.metrics import oracle_rank_ic
from studies.atft.table import clean

HORIZONS = (1, 5, 10, 20)


@pytest.fixture(scope="module")
def market():
    return simulate(MarketConfig(num_days=400, num_stocks=60), 0, HORIZONS)


def test_a_seed_is_a_market():
    config = MarketConfig(num_days=200, num_stocks=24)
    first, again, other = (simulate(config, seed, (5,)) for seed in (3, 3, 4))
    for name, values in first.table.columns.items():
        np.testing.assert_array_equal(values, again.table.columns[name])
    np.testing.assert_array_equal(first.oracle[5], again.oracle[5])
    assert not np.array_equal(first.oracle[5], other.oracle[5])


@pytest.mark.parametrize("day", [20, int(BREAK * 200) - 3], ids=["before the break", "across the break"])
def test_the_oracle_is_the_mean_of_simulated_futures(day):
    paths, horizon = 6000, 6
    rng = np.random.default_rng(0)
    law = Dynamics(MarketConfig(num_days=200, num_stocks=24, snr=1.0), rng)
    state = law.start(rng)
    for t in range(30):
        state, _ = law.step(state, t - 30, rng)
    want = law.expected_return(state, day, horizon)
    many = type(state)(**{k: np.broadcast_to(v, (paths, *v.shape)) for k, v in vars(state).items()})
    total = np.zeros((paths, 24))
    for t in range(horizon):
        many, returns = law.step(many, day + t, rng)
        total += returns
    z = (total.mean(axis=0) - want) / (total.std(axis=0) / np.sqrt(paths))
    assert np.abs(z).max() < 5 and np.corrcoef(total.mean(axis=0), want)[0, 1] > 0.99


def test_the_oracle_ranks_at_every_horizon_and_noise_does_not(market):
    grid = to_grid(clean(market.table)[0])
    returns = forward_returns(grid, HORIZONS)[60:-20]
    for j, h in enumerate(HORIZONS):
        oracle = market.oracle[h][60:-20]
        days = len(oracle)
        assert oracle_rank_ic(oracle, returns[..., j], 20) > 0.10
        shifted = np.roll(oracle, 7, axis=1)
        assert abs(oracle_rank_ic(shifted, returns[..., j], 20)) < 4 * 0.14 / np.sqrt(days / h)


@pytest.mark.parametrize(
    ("markets", "least", "most"), [(2, 0.30, 0.54), pytest.param(8, 0.40, 0.50, marks=pytest.mark.slow)]
)
def test_ridge_reaches_some_of_the_oracle_and_leaves_the_rest_to_a_model(markets, least, most):
    """One day ahead. The market is tuned for 0.40 to 0.50; 8 markets have 0.42, of which single ones differ by 0.06, so
    that two are within three deviations of it, 0.12."""
    [(ridge, oracle)] = rank_ics(markets, 1)
    assert least < ridge / oracle < most


def test_a_market_without_signal_has_an_oracle_of_nothing():
    market = simulate(MarketConfig(num_days=200, num_stocks=24, snr=0.0), 0, (1,))
    assert (market.oracle[1] == 0).all()


def test_the_flaws_are_there(market):
    table = market.table
    cleaned, report = clean(table)
    assert report["duplicate_rows"] == 1 and len(cleaned) == len(table) - 1
    grid = to_grid(cleaned)
    assert grid.jumps >= 1
    rows = grid.observed.sum(axis=1)
    assert rows.min() < 0.5 * np.median(rows)
    assert 0.01 < np.isnan(table.columns["flow"]).mean() < 0.03
    assert not grid.observed[0].all() and not grid.observed[-1].all()
    assert len([name for name in table.columns if name.startswith("decoy")]) == 20
    assert (table.columns["high"] >= table.columns["low"]).all()
    ties = sum(len(np.unique(day[np.isfinite(day)])) < np.isfinite(day).sum() for day in grid.columns["close"])
    assert ties > 0
