"""The composite loss against numpy and scipy in float64, and its edge rules."""

import numpy as np
import pytest
import torch
from scipy.stats import rankdata, spearmanr

from studies.atft.losses import composite
from studies.atft.phases import ALL as EVERY
from studies.atft.phases import PHASES, loss_weights
from trainer.errors import ConfigError
from trainer.losses.ranking import MIN_SHARPE_DAYS, average_ranks, correlation, soft_rank_ic, soft_ranks
from trainer.losses.ranking import sharpe_ratios as sharpe

DAYS, STOCKS = 12, 30
ALL = PHASES["3"]


def day_batch(seed: int = 0, days: int = DAYS, horizons: int = 2):
    generator = torch.Generator().manual_seed(seed)
    p, y, r = torch.randn(3, days, horizons, STOCKS, generator=generator)
    mask = torch.rand(days, STOCKS, generator=generator) > 0.2
    return p, y, r, mask, torch.ones(1, days)


def loss_of(p, y, r, mask, blocks, weights=ALL, **options):
    horizon_weights = options.pop("horizon_weights", torch.full((p.shape[1],), 1 / p.shape[1]))
    options = {"tau": 0.2, "min_stocks": 5, **options}
    return composite(p, y, r, mask, blocks, weights=weights, horizon_weights=horizon_weights, **options)


def test_every_term_equals_its_formula_in_numpy():
    p, y, r, mask, blocks = day_batch()
    result = loss_of(p, y, r, mask, blocks)
    want = dict.fromkeys(PHASES["3"], 0.0)
    for h in range(2):
        daily = []
        for t in range(DAYS):
            v = mask[t].numpy()
            a, b, ret = (x[t, h].double().numpy()[v] for x in (p, y, r))
            s = (a - a.mean()) / a.std()
            soft = 0.5 + (1 / (1 + np.exp(-(s[:, None] - s[None]) / 0.2))).sum(axis=1)
            want["mse"] += np.mean((a - b) ** 2) / 2
            want["cs_ic"] += (1 - np.corrcoef(a, b)[0, 1]) / 2
            want["rank_ic"] += (1 - np.corrcoef(soft, rankdata(b))[0, 1]) / 2
            w = (a - a.mean()) / np.abs(a - a.mean()).sum()
            daily.append(w @ ret)
        want["sharpe"] -= DAYS * np.mean(daily) / np.std(daily) / 2
    assert int(result.count) == DAYS
    for name, value in want.items():
        assert float(result.terms[f"loss_{name}"]) == pytest.approx(value, rel=2e-4)
    assert float(result.sum) == pytest.approx(sum(ALL[k] * v for k, v in want.items()), rel=2e-4)


def test_soft_ranks_become_average_ranks_as_tau_falls():
    p = torch.tensor([[0.3, -1.0, 0.3, 2.0, 0.9, 0.3]])
    valid = torch.ones_like(p, dtype=torch.bool)
    torch.testing.assert_close(soft_ranks(p, valid, 1e-3), torch.tensor(rankdata(p.numpy(), axis=1)).float())
    coarse = soft_ranks(p, valid, 0.5)
    assert (coarse - soft_ranks(p, valid, 1e-3)).abs().max() > 0.1


def test_average_ranks_of_the_valid_equal_scipy_with_ties():
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, 5, (8, STOCKS), generator=generator).float()
    valid = torch.rand(8, STOCKS, generator=generator) > 0.3
    ranks = average_ranks(y, valid)
    for t in range(8):
        np.testing.assert_array_equal(ranks[t, valid[t]].numpy(), rankdata(y[t, valid[t]].numpy()))


def test_soft_rank_ic_approaches_spearman():
    p, y, _, mask, _ = day_batch(3, horizons=1)
    p, y = torch.where(mask[:, None], p, 0.0)[:, 0], torch.where(mask[:, None], y, 0.0)[:, 0]
    values = soft_rank_ic(p, y, mask, 1e-5)
    for t in range(DAYS):
        v = mask[t].numpy()
        assert float(values[t]) == pytest.approx(spearmanr(p[t, v], y[t, v])[0], abs=1e-4)


def test_constant_predictions_have_a_finite_gradient_and_no_skill():
    _, y, r, mask, blocks = day_batch()
    p = torch.zeros_like(y, requires_grad=True)
    result = loss_of(p, y, r, mask, blocks)
    result.sum.backward()
    assert torch.isfinite(p.grad).all() and p.grad.abs().max() > 0
    assert float(result.terms["loss_rank_ic"]) == pytest.approx(DAYS, abs=1e-4)


def test_what_is_masked_out_may_be_nan_and_gets_no_gradient():
    p, y, r, mask, blocks = day_batch()
    clean = loss_of(p, y, r, mask, blocks)
    hole = ~mask[:, None].expand_as(p)
    y, r = y.masked_fill(hole, torch.nan), r.masked_fill(hole, torch.nan)
    dirty = p.masked_fill(hole, torch.nan).requires_grad_()
    result = loss_of(dirty, y, r, mask, blocks)
    result.sum.backward()
    torch.testing.assert_close(result.sum, clean.sum)
    assert torch.isfinite(dirty.grad).all() and (dirty.grad[hole] == 0).all()


@pytest.mark.parametrize("fault", ["few stocks", "constant target", "no target"])
def test_a_day_that_cannot_be_scored_is_excluded_and_counted(fault):
    p, y, r, mask, blocks = day_batch()
    without = [t for t in range(DAYS) if t != 4]
    want = loss_of(p[without], y[without], r[without], mask[without], blocks[:, without])
    if fault == "few stocks":
        mask[4, 4:] = False
    elif fault == "constant target":
        y[4, 1] = 0.7
    else:
        y[4] = torch.nan
    result = loss_of(p, y, r, mask, blocks)
    assert int(result.count) == DAYS - 1 and float(result.terms["excluded_days"]) == 1
    torch.testing.assert_close(result.sum, want.sum)


def test_when_all_days_are_excluded_the_count_is_zero_not_the_loss_alone():
    p, y, r, mask, blocks = day_batch()
    result = loss_of(p.requires_grad_(), y, r, torch.zeros_like(mask), blocks)
    assert int(result.count) == 0
    result.sum.backward()
    assert (p.grad == 0).all()


def test_blocks_add_up_so_that_accumulation_is_exact():
    p, y, r, mask, _ = day_batch(days=20)
    halves = torch.zeros(2, 20)
    halves[0, :9], halves[1, 9:] = 1, 1
    whole = loss_of(p, y, r, mask, halves)
    first = loss_of(p[:9], y[:9], r[:9], mask[:9], torch.ones(1, 9))
    second = loss_of(p[9:], y[9:], r[9:], mask[9:], torch.ones(1, 11))
    torch.testing.assert_close(whole.sum, first.sum + second.sum)
    assert int(whole.count) == int(first.count + second.count)


def test_sharpe_depends_on_the_predictions_and_needs_enough_days():
    p, _, r, mask, blocks = day_batch(horizons=1)
    p = p[:, 0].requires_grad_()
    r = r[:, 0]
    sharpe(p, r, mask, blocks).mean().backward()
    assert p.grad.abs().max() > 1e-3
    few = blocks.clone()
    few[:, MIN_SHARPE_DAYS - 1 :] = 0
    assert (sharpe(p, r, mask, few) == 0).all()
    opposite = sharpe(-p, r, mask, blocks)
    torch.testing.assert_close(opposite, -sharpe(p, r, mask, blocks))


def test_a_horizon_without_weight_neither_counts_nor_excludes():
    p, y, r, mask, blocks = day_batch()
    want = loss_of(p[:, :1], y[:, :1], r[:, :1], mask, blocks, horizon_weights=torch.ones(1))
    y[:, 1] = torch.nan
    result = loss_of(p, y, r, mask, blocks, horizon_weights=torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(result.sum, want.sum)


def test_half_precision_predictions_are_scored_in_fp32():
    p, y, r, mask, blocks = day_batch()
    half = p.bfloat16()
    torch.testing.assert_close(loss_of(half, y, r, mask, blocks).sum, loss_of(half.float(), y, r, mask, blocks).sum)


def test_huber_is_the_mean_of_the_day():
    p, y, r, mask, blocks = day_batch(horizons=1)
    result = loss_of(p, y, r, mask, blocks, weights={"mse": 1.0}, point="huber")
    want = sum(torch.nn.functional.huber_loss(p[t, 0, mask[t]], y[t, 0, mask[t]]) for t in range(DAYS))
    torch.testing.assert_close(result.sum, want)


def test_correlation_of_a_line_is_one():
    y = torch.randn(3, STOCKS, generator=torch.Generator().manual_seed(0))
    valid = torch.ones_like(y, dtype=torch.bool)
    torch.testing.assert_close(correlation(3 * y + 1, y, valid), torch.ones(3), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("phase", "scale", "word"),
    [("5", {}, "phase"), ("warmup", {}, "phase"), ("2", {"rankic": 1.0}, "rankic"), ("1", {"mse": 0.0}, "above 0")],
)
def test_what_is_not_understood_is_an_error_never_an_empty_loss(phase, scale, word):
    with pytest.raises(ConfigError, match=word):
        loss_weights(phase, scale)


def test_phase_weights_are_scaled():
    assert loss_weights("2", {"sharpe": 2.0}).at(0.7) == {"mse": 0.8, "rank_ic": 0.1, "cs_ic": 0.05, "sharpe": 0.1}


def test_the_schedule_takes_the_four_phases_in_turn():
    weights = loss_weights(EVERY, {"mse": 1.0, "rank_ic": 2.0})
    found = [weights.at(progress) for progress in (0.0, 0.24, 0.25, 0.5, 0.75, 1.0)]
    rows = [PHASES[k] | ({"rank_ic": 2 * PHASES[k]["rank_ic"]} if k != "1" else {}) for k in "112344"]
    assert found == rows
    with pytest.raises(ConfigError, match="phase 1 no term"):
        loss_weights(EVERY, {"mse": 0.0})


def test_a_prediction_that_is_not_finite_shows_in_the_loss():
    """It is no missing stock: excluded, a model that has diverged would have nothing but empty days."""
    p, y, r, mask, blocks = day_batch()
    p[0, 0, int(mask[0].nonzero()[0])] = torch.nan
    assert torch.isnan(loss_of(p, y, r, mask, blocks).sum)
