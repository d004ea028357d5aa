"""The composite loss against numpy and scipy in float64, and its edge rules."""

import numpy as np
import pytest
import torch
from scipy.stats import rankdata, spearmanr
from sklearn.metrics import mean_pinball_loss

from hpo.errors import SpaceError
from hpo.space.config import Raw, apply, flatten
from studies.atft.config import Config
from studies.atft.losses import MEDIAN, QUANTILES, composite
from studies.atft.phases import ALL as EVERY
from studies.atft.phases import PHASES, TERMS, behind, plan
from trainer.errors import ConfigError
from trainer.losses.ranking import MIN_SHARPE_DAYS, average_ranks, correlation, soft_rank_ic, soft_ranks
from trainer.losses.ranking import sharpe_ratios as sharpe

DAYS, STOCKS = 12, 30
ALL = dict(PHASES["3"].weights)


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
    want = dict.fromkeys(ALL, 0.0)
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
    torch.testing.assert_close(result.terms["loss_huber"], want)


def test_quantiles_are_scored_by_scikit_learns_pinball_loss():
    _, y, r, mask, blocks = day_batch()
    p = torch.randn(*y.shape, len(QUANTILES), generator=torch.Generator().manual_seed(7)).sort(dim=-1).values
    result = loss_of(p, y, r, mask, blocks, point="quantile")
    want = np.mean(
        [
            mean_pinball_loss(y[t, h, mask[t]].numpy(), p[t, h, mask[t], k].numpy(), alpha=q)
            for t in range(DAYS)
            for h in range(2)
            for k, q in enumerate(QUANTILES)
        ]
    )
    assert float(result.terms["loss_quantile"]) / DAYS == pytest.approx(want, rel=1e-5)
    by_median = loss_of(p[..., MEDIAN], y, r, mask, blocks)
    for name in ("rank_ic", "cs_ic", "sharpe"):
        torch.testing.assert_close(result.terms[f"loss_{name}"], by_median.terms[f"loss_{name}"])


def test_shares_of_the_gradient_are_those_of_finite_differences():
    """Each term's gradient by the predictions, from central differences of its own loss in float64's steps."""
    p, y, r, mask, blocks = day_batch(days=8, horizons=1)
    result = loss_of(p.requires_grad_(), y, r, mask, blocks, shares=True)
    result.sum.backward()
    alone = {}
    for name, weight in ALL.items():
        q = p.detach().clone().requires_grad_()
        loss_of(q, y, r, mask, blocks, weights={name: weight}).sum.backward()
        alone[name] = q.grad
        at = tuple(int(i) for i in (q.grad.abs() == q.grad.abs().max()).nonzero()[0])
        step = torch.zeros_like(p).index_put_(tuple(torch.tensor([i]) for i in at), torch.tensor([0.02]))
        up, down = (loss_of(p.detach() + s, y, r, mask, blocks, weights={name: weight}).sum for s in (step, -step))
        assert float((up - down) / 0.04) == pytest.approx(float(q.grad[at]), rel=0.02)
    torch.testing.assert_close(sum(alone.values()), p.grad)
    total = sum(float(g.norm()) for g in alone.values())
    for name, gradient in alone.items():
        assert float(result.terms[f"grad_share_{name}"]) / 8 == pytest.approx(float(gradient.norm()) / total, rel=1e-4)


def test_shares_of_the_gradient_change_no_gradient():
    p, y, r, mask, blocks = day_batch()
    grads = []
    for shares in (False, True):
        q = p.clone().requires_grad_()
        loss_of(q, y, r, mask, blocks, shares=shares).sum.backward()
        grads.append(q.grad)
    assert torch.equal(*grads)


def test_horizon_returns_may_be_divided_and_sharpe_is_numpys():
    """The ratio has no scale: r, r/h and r in deviations are one term, but for eps."""
    p, _, r, mask, blocks = day_batch(horizons=1)
    daily = []
    for t in range(DAYS):
        v = mask[t].numpy()
        a = p[t, 0].double().numpy()[v]
        w = (a - a.mean()) / np.abs(a - a.mean()).sum()
        daily.append(w @ r[t, 0].double().numpy()[v] / 5)
    found = loss_of(p, r, r / 5, mask, blocks, weights={"sharpe": 1.0})
    assert float(found.sum) / DAYS == pytest.approx(-np.mean(daily) / np.sqrt(np.var(daily) + 1e-6), rel=1e-4)
    torch.testing.assert_close(
        found.sum, loss_of(p, r, r, mask, blocks, weights={"sharpe": 1.0}).sum, rtol=0.01, atol=0
    )


def test_a_block_too_short_for_a_weighted_sharpe_ratio_is_excluded():
    """Never a loss of 0: fewer than 8 scored days of a block skip the step, or leave the other block alone."""
    p, y, r, mask, _ = day_batch(days=20)
    halves = torch.zeros(2, 20)
    halves[0, :9], halves[1, 9:] = 1, 1
    whole = loss_of(p[9:], y[9:], r[9:], mask[9:], torch.ones(1, 11))
    y[2:4] = torch.nan
    result = loss_of(p, y, r, mask, halves)
    assert int(result.count) == 11 and float(result.terms["excluded_days"]) == 9
    torch.testing.assert_close(result.sum, whole.sum)
    alone = loss_of(p[:9], y[:9], r[:9], mask[:9], torch.ones(1, 9), weights={"sharpe": 1.0})
    assert int(alone.count) == 0
    assert int(loss_of(p[:9], y[:9], r[:9], mask[:9], torch.ones(1, 9), weights={"mse": 1.0}).count) == 7


def test_correlation_of_a_line_is_one():
    y = torch.randn(3, STOCKS, generator=torch.Generator().manual_seed(0))
    valid = torch.ones_like(y, dtype=torch.bool)
    torch.testing.assert_close(correlation(3 * y + 1, y, valid), torch.ones(3), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"loss.phase": "5"}, ["loss.phase '5'", "1, 2, 3, 4, schedule"]),
        ({"loss.phase": "2: mse 0.8"}, ["loss.phase '2: mse 0.8'", "schedule"]),
        ({"loss.scale.rankic": 1.0}, ["loss.scale.rankic", "loss.scale.rank_ic"]),
        ({"phases.2.weights.mse": -1.0}, ["phases.2.weights.mse", "-1", "greater than or equal to 0"]),
        ({"phases.2.weights.mse": "much"}, ["phases.2.weights.mse", "much", "number"]),
        ({"phases.2.lr": 0.0}, ["phases.2.lr", "greater than 0"]),
        ({"phases.5.lr": 1.0}, ["phases: '5' is not a phase: choose among 1, 2, 3, 4"]),
        (flatten({"phases": {"fine": {"lr": 0.1}}}), ["phases: 'fine' is not a phase: choose among 1, 2, 3, 4"]),
        ({"phases.2.weights.rankic": 0.1}, ["no field 'rankic'; did you mean 'phases.2.weights.rank_ic'?"]),
        ({"phase.2.lr": 0.1}, ["no field 'phase'; did you mean 'phases.2.lr'?"]),
        ({"loss.phase": "1", "loss.scale.mse": 0.0}, ["phase 1 is left no term", "phases.1.weights or loss.scale"]),
        ({"loss.phase": "schedule", "phases.1.weights.mse": 0.0}, ["phase 1 is left no term"]),
        ({f"phases.{k}.epochs": 0.0 for k in "1234"} | {"loss.phase": "schedule"}, ["phases.*.epochs are all 0"]),
        ({"loss.horizon_weights.7": 1.0}, ["loss.horizon_weights.7", "1, 5, 10, 20"]),
        ({f"loss.horizon_weights.{h}": 0.0 for h in (1, 5, 10, 20)}, ["loss.horizon_weights are all 0"]),
        (
            {"loss.phase": "schedule", "train.parallel.data": 2, "train.batch_size": 2},
            ["train.parallel.find_unused=true"],
        ),
        ({"loss.point": "mae"}, ["loss.point", "'mae'", "quantile"]),
    ],
)
def test_what_is_not_understood_is_an_error_never_an_empty_loss(overrides, words):
    with pytest.raises(SpaceError) as caught:
        apply(Config(), {path: Raw(value) if isinstance(value, str) else value for path, value in overrides.items()})
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), str(caught.value)


def test_a_term_of_another_name_is_refused_in_the_plan_too():
    with pytest.raises(ConfigError, match=r"loss.scale.rankic is not a term"):
        plan("2", {"rankic": 1.0})


def test_phase_weights_are_scaled():
    assert plan("2", {"sharpe": 2.0}).weights.at(0.7) == {"mse": 0.8, "rank_ic": 0.1, "cs_ic": 0.05, "sharpe": 0.01}


def test_the_schedule_takes_the_four_phases_in_turn():
    """By hand: lengths of 1, 2, 4 and 1 of 8, each with its own weights, rate and parts of the model."""
    overrides = {f"phases.{k}.epochs": n for k, n in zip("1234", (1.0, 2.0, 4.0, 1.0), strict=True)}
    config = apply(Config(), overrides | {"loss.phase": EVERY, "phases.2.lr": 2.0, "loss.scale.rank_ic": 2.0})
    run = plan(config.loss.phase, dict(config.loss.scale), config.phases)
    for progress, name in (
        (0.0, "1"),
        (0.124, "1"),
        (0.125, "2"),
        (0.374, "2"),
        (0.375, "3"),
        (0.875, "4"),
        (1.0, "4"),
    ):
        phase = PHASES[name]
        want = {term: getattr(phase.weights, term) * (2 if term == "rank_ic" else 1) for term in TERMS}
        assert run.weights.at(progress) == {term: weight for term, weight in want.items() if weight}
        assert run.at(progress).lr == (2.0 if name == "2" else phase.lr)
        assert (run.at(progress).graph, run.at(progress).fan) == (name > "1", name > "2")
    # What was trained up to a phase's end is judged by that phase.
    assert run.at(behind(0.375)) == config.phases["2"] and run.at(behind(0.0)) == config.phases["1"]
    left_out = plan(EVERY, {}, {**PHASES, "1": PHASES["1"].model_copy(update={"epochs": 0.0})})
    assert left_out.at(0.0) == PHASES["2"] and left_out.weights.at(0.99) == plan("4").weights.at(0.0)


def test_weights_of_horizons_are_those_named_and_1_for_the_rest():
    assert apply(Config(), {"loss.horizon_weights.5": 3.0, "loss.horizon_weights.1": 0.0}).omega == [0.0, 3.0, 1.0, 1.0]


def test_a_prediction_that_is_not_finite_shows_in_the_loss():
    """It is no missing stock: excluded, a model that has diverged would have nothing but empty days."""
    p, y, r, mask, blocks = day_batch()
    p[0, 0, int(mask[0].nonzero()[0])] = torch.nan
    assert torch.isnan(loss_of(p, y, r, mask, blocks).sum)
