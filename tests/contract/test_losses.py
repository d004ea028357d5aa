"""What every loss of trainer.losses keeps, and each against its paper's formula or torch's function in float64."""

from __future__ import annotations

import inspect
import itertools
import math
import re

import numpy as np
import pytest
import torch
from places import ROOT
from rounds import rounds
from scipy.stats import rankdata
from torch import nn
from torch.nn import functional as F

from trainer.errors import TrainerError
from trainer.gradients.accumulate import accumulate
from trainer.losses import LOSSES, gradient_penalty, sequence_log_probs, uncertainty_sum, weighted_sum
from trainer.task import Loss

N = 12
F64 = torch.float64
GUIDE = ROOT / "docs/guide/losses.md"


def num(x) -> float:
    """A number, also of a tensor with a gradient."""
    return x.item() if isinstance(x, torch.Tensor) else float(x)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def classes(*shape: int, high: int = 5, seed: int = 1, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


# Of each loss: the arguments with a gradient, the others, and options. All are cut along their first dimension.
CASES: dict[str, tuple[list[torch.Tensor], list[torch.Tensor], dict]] = {
    "mse": ([rand(N, 3)], [rand(N, 3, seed=1)], {}),
    "huber": ([2 * rand(N, 3)], [rand(N, 3, seed=1)], {"delta": 0.7}),
    "quantile": ([rand(N, 3)], [rand(N, seed=1)], {}),
    "cross_entropy": ([rand(N, 5)], [classes(N)], {"label_smoothing": 0.1, "temperature": 0.7}),
    "focal": ([rand(N, 5)], [classes(N)], {"gamma": 1.5, "alpha": torch.tensor([0.1, 0.5, 1.0, 2.0, 0.3], dtype=F64)}),
    "ctc": (
        [rand(N, 9, 5)],
        [classes(N, 3, low=1), torch.full((N,), 9), classes(N, high=4, seed=2)],
        {},
    ),
    "rank_ic": ([rand(N, 8)], [rand(N, 8, seed=1)], {}),
    "cs_ic": ([rand(N, 8)], [rand(N, 8, seed=1)], {}),
    "sharpe": ([rand(N, 8)], [rand(N, 8, seed=1)], {}),
    "causal_contrastive": ([rand(N, 4), rand(N, 4, seed=1)], [], {"temperature": 0.5}),
    "dpo": ([rand(N), rand(N, seed=1)], [rand(N, seed=2), rand(N, seed=3)], {"label_smoothing": 0.1}),
    "ipo": ([rand(N), rand(N, seed=1)], [rand(N, seed=2), rand(N, seed=3)], {}),
    "kto": ([rand(N)], [rand(N, seed=1), classes(N, high=2).bool()], {"kl": rand(7).abs(), "weight_desirable": 1.3}),
}
# A sum over the first dimension; sharpe is one over blocks of it, and the contrastive loss has its batch's negatives.
ADDITIVE = [name for name in CASES if name not in ("sharpe", "causal_contrastive")]


def call(name: str, part: slice = slice(None), dtype: torch.dtype = F64) -> tuple[Loss, list[torch.Tensor]]:
    inputs, others, options = CASES[name]
    leaves = [x[part].to(dtype).requires_grad_() for x in inputs]
    others = [x[part].to(dtype) if x.is_floating_point() else x[part] for x in others]
    return LOSSES[name](*leaves, *others, **options), leaves


def test_every_loss_is_held_to_this_suite():
    assert list(CASES) == list(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_the_losss(name):
    inputs, others, options = CASES[name]
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    assert torch.autograd.gradcheck(lambda *x: LOSSES[name](*x, *others, **options).sum, leaves, atol=1e-6)


@rounds("name", LOSSES)
def test_it_is_a_scalar_sum_with_a_count_above_zero(name):
    loss, _ = call(name)
    assert loss.sum.shape == () and loss.sum.requires_grad
    assert 0 < num(loss.count) <= N * 3
    assert all(term.shape == () and not term.requires_grad for term in loss.terms.values())


@rounds("cuts", [[N], [5, 7], [1] * N])
@pytest.mark.parametrize("name", ADDITIVE)
def test_accumulation_over_uneven_micro_batches_is_exact(name, cuts):
    whole, leaves = call(name)
    (whole.sum / whole.count).backward()
    ends = np.cumsum([0, *cuts])
    parts = [call(name, slice(a, b)) for a, b in itertools.pairwise(ends)]
    window = accumulate([loss for loss, _ in parts], lambda i, loss: loss)
    assert num(window.loss) == pytest.approx(whole.sum.item(), rel=1e-9)
    assert num(window.count) == num(whole.count)
    for i, leaf in enumerate(leaves):
        found = torch.cat([part[i].grad for _, part in parts]) / window.count
        torch.testing.assert_close(found, leaf.grad, rtol=1e-9, atol=1e-12)
    for key, term in whole.terms.items():
        assert num(window.terms[key]) == pytest.approx(num(term), rel=1e-9)


@rounds("name", sorted(set(LOSSES) - set(ADDITIVE)))
def test_what_is_said_not_to_add_up_does_not(name):
    whole = call(name)[0]
    parts = [call(name, part)[0] for part in (slice(0, N // 2), slice(N // 2, N))]
    assert num(sum(part.sum for part in parts)) != pytest.approx(whole.sum.item(), rel=1e-3)


@rounds("name", LOSSES)
def test_under_autocast_it_is_computed_in_full_precision(name):
    """Half precision in, float32 inside: the loss of the inputs as they were rounded."""
    _, leaves = call(name, dtype=torch.bfloat16)
    _, others, options = CASES[name]
    others = [x.bfloat16() if x.is_floating_point() else x for x in others]
    with torch.autocast("cpu", torch.bfloat16):
        loss = LOSSES[name](*leaves, *others, **options)
    wide = [x.double() if x.is_floating_point() else x for x in others]
    exact = LOSSES[name](*(x.detach().double() for x in leaves), *wide, **options)
    assert loss.sum.dtype in (torch.float32, F64)
    assert loss.sum.item() == pytest.approx(num(exact.sum), rel=2e-5)


@rounds("name", LOSSES)
def test_one_sample_has_a_loss_and_a_finite_gradient_or_no_count(name):
    loss, leaves = call(name, slice(0, 1))
    loss.sum.backward()
    assert math.isfinite(num(loss.sum))
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    assert num(loss.count) > 0 or num(loss.sum) == 0


@rounds("name", LOSSES)
def test_a_batch_of_nothing_is_a_loss_of_nothing_with_a_gradient(name):
    loss, leaves = call(name, slice(0, 0))
    loss.sum.backward()
    assert (num(loss.sum), num(loss.count)) == (0, 0)
    assert all(leaf.grad is not None and leaf.grad.shape == leaf.shape for leaf in leaves)


MASKED = [name for name in LOSSES if {"mask", "valid"} & inspect.signature(LOSSES[name]).parameters.keys()]


@pytest.mark.parametrize("name", MASKED)
def test_a_mask_of_nothing_gives_nothing_and_hides_what_is_not_finite(name):
    inputs, others, options = CASES[name]
    rows = name in ("quantile", "causal_contrastive")
    mask = torch.zeros(inputs[0].shape[:1] if rows else inputs[0].shape, dtype=torch.bool)
    bad = [x.clone() for x in inputs]
    bad[0][0] = torch.nan
    leaves = [x.requires_grad_() for x in bad]
    key = "valid" if "valid" in inspect.signature(LOSSES[name]).parameters else "mask"
    loss = LOSSES[name](*leaves, *others, **{key: mask}, **options)
    loss.sum.backward()
    assert (num(loss.sum), num(loss.count)) == (0.0, 0.0)
    assert all((leaf.grad == 0).all() for leaf in leaves)
    mask[1:] = True
    loss = LOSSES[name](*leaves, *others, **{key: mask}, **options)
    without = LOSSES[name](*(x[1:] for x in inputs), *(x[1:] for x in others), **options)
    assert num(loss.sum) == pytest.approx(num(without.sum))
    assert num(loss.count) == num(without.count)


@rounds("name", ["mse", "huber", "quantile", "rank_ic", "cs_ic", "sharpe", "dpo", "ipo", "kto"])
def test_shapes_that_would_broadcast_are_refused(name):
    inputs, others, options = CASES[name]
    with pytest.raises(TrainerError, match="give them one shape"):
        LOSSES[name](*inputs, *(x[:1] for x in others), **options)


# --- Each against its formula


def test_pointwise_losses_are_torchs():
    (p,), (y,), _ = CASES["mse"]
    assert num(LOSSES["mse"](p, y).sum) == pytest.approx(num(F.mse_loss(p, y, reduction="sum")))
    (p,), (y,), options = CASES["huber"]
    want = F.huber_loss(p, y, reduction="sum", **options)
    assert num(LOSSES["huber"](p, y, **options).sum) == pytest.approx(num(want))


def test_the_best_constant_under_the_pinball_loss_is_the_quantile():
    """Koenker & Bassett: the minimiser over constants is the sample's quantile."""
    y = rand(501)
    grid = torch.linspace(-2, 2, 2001, dtype=F64)
    for q in (0.1, 0.5, 0.9):
        losses = [num(LOSSES["quantile"](c.expand(501, 1), y, quantiles=[q]).sum) for c in grid]
        best = num(grid[int(np.argmin(losses))])
        assert best == pytest.approx(num(np.quantile(y.numpy(), q)), abs=0.01)
    e = np.array([-2.0, 3.0])
    found = LOSSES["quantile"](torch.zeros(2, 1, dtype=F64), torch.tensor(e), quantiles=[0.3]).sum
    assert num(found) == pytest.approx(0.7 * 2 + 0.3 * 3)


@rounds("levels", [[0.5], [0.1, 0.5, 1.0]])
def test_levels_that_do_not_fit_are_refused(levels):
    with pytest.raises(TrainerError, match="one for each level"):
        LOSSES["quantile"](rand(N, 3), rand(N), quantiles=levels)


@rounds("weighted", [False, True])
def test_cross_entropy_over_its_count_is_torchs_mean(weighted):
    logits, y = rand(4, 6, 5), classes(4, 6)
    y[0, :3] = -100
    options = {"label_smoothing": 0.1, "weight": rand(5, seed=9).abs() if weighted else None}
    loss = LOSSES["cross_entropy"](logits, y, **options)
    want = F.cross_entropy(logits.flatten(0, 1), y.flatten(), **options)
    assert num(loss.sum / loss.count) == pytest.approx(num(want))
    soft = rand(4, 6, 5, seed=4).softmax(-1)
    loss = LOSSES["cross_entropy"](logits, soft, temperature=2.0)
    assert num(loss.sum) == pytest.approx(num(-(soft * (logits / 2).log_softmax(-1)).sum()))


@rounds(("soft", "weighted"), [(False, False), (False, True), (True, True)])
def test_smoothing_by_a_tensor_is_torchs_by_its_number(soft, weighted):
    logits = rand(6, 5).requires_grad_()
    targets = rand(6, 5, seed=4).softmax(-1) if soft else classes(6)
    weight = rand(5, seed=9).abs() if weighted else None
    found, want = (
        torch.autograd.grad(LOSSES["cross_entropy"](logits, targets, weight=weight, label_smoothing=by).sum, logits)[0]
        for by in (torch.tensor(0.3, dtype=logits.dtype), 0.3)
    )
    torch.testing.assert_close(found, want)


def test_focal_is_the_papers_and_cross_entropy_at_gamma_zero():
    (logits,), (y,), options = CASES["focal"]
    y = y.clone()
    p = logits.softmax(-1)[torch.arange(N), y]
    want = -(options["alpha"][y] * (1 - p) ** 1.5 * p.log()).sum()
    assert num(LOSSES["focal"](logits, y, **options).sum) == pytest.approx(num(want))
    plain = LOSSES["focal"](logits, y, gamma=0.0)
    assert num(plain.sum) == pytest.approx(num(F.cross_entropy(logits, y, reduction="sum")))
    y[0] = -100
    assert num(LOSSES["focal"](logits, y).count) == N - 1


@rounds("gamma", [0.5, 2.0])
def test_focal_has_a_finite_gradient_where_the_model_is_certain(gamma):
    logits = torch.tensor([[200.0, 0.0], [-200.0, 0.0]], requires_grad=True)
    LOSSES["focal"](logits, torch.tensor([0, 0]), gamma=gamma).sum.backward()
    assert logits.grad.isfinite().all()


def test_ctc_is_the_sum_over_all_alignments():
    """Graves et al. 2006: enumerate every path of four steps over blank, a, b that collapses to the target."""
    logits = rand(1, 4, 3)
    p = logits.softmax(-1)[0].numpy()
    for target in ([1, 2], [1, 1], [2]):
        total = 0.0
        for path in np.ndindex(3, 3, 3, 3):
            collapsed = [k for i, k in enumerate(path) if k and (i == 0 or path[i - 1] != k)]
            total += np.prod([p[t, k] for t, k in enumerate(path)]) if collapsed == target else 0.0
        loss = LOSSES["ctc"](logits, torch.tensor([target]), torch.tensor([4]), torch.tensor([len(target)]))
        assert num(loss.sum) == pytest.approx(-math.log(total))


def test_ctc_leaves_out_what_has_no_alignment():
    logits = rand(3, 3, 4).requires_grad_()
    targets = torch.tensor([[1, 1, 2], [1, 2, 3], [1, 1, 0]])  # the first needs a blank, so four steps
    loss = LOSSES["ctc"](logits, targets, torch.tensor([3, 3, 3]), torch.tensor([3, 3, 2]))
    loss.sum.backward()
    assert (int(loss.count), int(loss.terms["impossible"])) == (2, 1)
    assert (logits.grad[0] == 0).all() and logits.grad[1:].abs().max() > 0 and logits.grad.isfinite().all()
    rest = LOSSES["ctc"](logits[1:], targets[1:], torch.tensor([3, 3]), torch.tensor([3, 2]))
    assert num(loss.sum) == pytest.approx(num(rest.sum))


@rounds("scale", [1e-4, 1.0, 1e4])
def test_rank_and_cross_sectional_ic_are_numpys_on_any_scale_of_targets(scale):
    (p,), (y,), _ = CASES["rank_ic"]
    pearson = sum(1 - np.corrcoef(a, b)[0, 1] for a, b in zip(p.numpy(), y.numpy(), strict=True))
    s = (p - p.mean(1, keepdim=True)) / p.std(1, keepdim=True, correction=0)
    soft = 0.5 + torch.sigmoid((s[:, :, None] - s[:, None]) / 0.2).sum(2)
    ranks = sum(1 - np.corrcoef(a, rankdata(b))[0, 1] for a, b in zip(soft.numpy(), y.numpy(), strict=True))
    assert num(LOSSES["cs_ic"](p, scale * y).sum) == pytest.approx(pearson, rel=1e-4)
    assert num(LOSSES["rank_ic"](p, scale * y).sum) == pytest.approx(ranks, rel=1e-3)


@pytest.mark.parametrize("name", ["rank_ic", "cs_ic"])
def test_days_without_a_rank_are_excluded_and_ties_are_not(name):
    p, y = rand(4, 6), rand(4, 6, seed=1)
    y[0] = 0.3  # constant
    y[1] = torch.nan
    y[1, 2] = 1.0  # one stock
    y[2, :3] = y[2, 3]  # ties
    loss = LOSSES[name](p.requires_grad_(), y)
    loss.sum.backward()
    assert (int(loss.count), int(loss.terms["excluded_days"])) == (2, 2)
    assert (p.grad[:2] == 0).all() and p.grad.isfinite().all()
    p = torch.zeros(4, 6, requires_grad=True)  # constant predictions: no skill, and a way out
    loss = LOSSES[name](p, y)
    loss.sum.backward()
    assert num(loss.sum) == pytest.approx(2.0, abs=1e-4)
    assert p.grad.isfinite().all() and p.grad[2:].abs().max() > 0


def test_sharpe_is_the_mean_over_the_deviation_of_the_books_returns():
    (p,), (r,), _ = CASES["sharpe"]
    w = (p - p.mean(1, keepdim=True)).numpy()
    daily = (w / np.abs(w).sum(1, keepdims=True) * r.numpy()).sum(1)
    loss = LOSSES["sharpe"](p, r)
    assert num(loss.sum / loss.count) == pytest.approx(-daily.mean() / daily.std(), rel=1e-3)


def test_sharpe_adds_up_over_blocks():
    p, r, blocks = rand(20, 6), rand(20, 6, seed=1), torch.zeros(2, 20)
    blocks[0, :9], blocks[1, 9:] = 1, 1
    whole = LOSSES["sharpe"](p, r, None, blocks)
    halves = [LOSSES["sharpe"](p[part], r[part]) for part in (slice(9), slice(9, 20))]
    assert num(whole.sum) == pytest.approx(num(sum(half.sum for half in halves)))


def info_nce(a, b, negatives, temperature):
    """Written out: one anchor at a time."""
    total, count = 0.0, 0
    for i in range(len(a)):
        cosine = [num(a[i] @ b[j] / a[i].norm() / b[j].norm()) / temperature for j in range(len(b))]
        others = [cosine[j] for j in range(len(b)) if negatives(i, j)]
        if others:
            total -= cosine[i] - math.log(sum(map(math.exp, [cosine[i], *others])))
            count += 1
    return total, count


@rounds("masked", ["nothing", "times", "groups", "valid", "all"])
def test_the_causal_contrastive_loss_is_info_nce_over_what_may_be_known(masked):
    a, b = CASES["causal_contrastive"][0]
    times, groups = classes(N, high=4), classes(N, high=3, seed=5)
    valid = torch.arange(N) % 4 != 1
    given = {"times": times, "groups": groups, "valid": valid}
    given = {key: value for key, value in given.items() if masked in (key, "all")}

    def negatives(i, j):
        return (
            i != j
            and ("times" not in given or times[j] <= times[i])
            and ("groups" not in given or groups[j] != groups[i])
            and ("valid" not in given or bool(valid[i] and valid[j]))
        )

    loss = LOSSES["causal_contrastive"](a, b, **given, temperature=0.3)
    assert (num(loss.sum), int(loss.count)) == pytest.approx(info_nce(a, b, negatives, 0.3))


def test_nothing_later_reaches_an_anchor():
    """No gradient flows from an anchor to a positive that comes after it."""
    a, b = (x.clone() for x in CASES["causal_contrastive"][0])
    b.requires_grad_()
    only_early = torch.zeros(N, dtype=torch.bool)
    only_early[:5] = True
    times = torch.arange(N)
    loss = LOSSES["causal_contrastive"](a, b, times=times)
    early = LOSSES["causal_contrastive"](a[:5], b[:5], times=times[:5])
    (slope,) = torch.autograd.grad(early.sum, b)
    assert (slope[5:] == 0).all()
    assert int(loss.count) == N - 1  # the first has nothing before it


@rounds("beta", [0.1, 0.5])
def test_preference_losses_are_the_papers(beta):
    (w, l), (rw, rl), _ = CASES["dpo"]
    h = ((w - rw) - (l - rl)).numpy()
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    smooth = -0.8 * np.log(sigmoid(beta * h)) - 0.2 * np.log(sigmoid(-beta * h))
    dpo, ipo = LOSSES["dpo"], LOSSES["ipo"]
    assert num(dpo(w, l, rw, rl, beta=beta).sum) == pytest.approx(-np.log(sigmoid(beta * h)).sum())
    assert num(dpo(w, l, rw, rl, beta=beta, label_smoothing=0.2).sum) == pytest.approx(smooth.sum())
    loss = ipo(w, l, rw, rl, beta=beta)
    assert num(loss.sum) == pytest.approx(((h - 1 / (2 * beta)) ** 2).sum())
    assert num(loss.terms["reward_margin"]) == pytest.approx(beta * h.sum())
    assert num(loss.terms["reward_accuracy"]) == (h > 0).sum()
    (policy,), (reference, desirable), _ = CASES["kto"]
    for kl in (torch.tensor([0.4, 0.8]), torch.tensor([-3.0])):
        r, z = (policy - reference).numpy(), max(num(kl.mean()), 0.0)
        want = np.where(desirable, 1.3 * (1 - sigmoid(beta * (r - z))), 0.7 * (1 - sigmoid(beta * (z - r)))).sum()
        options = {"weight_desirable": 1.3, "weight_undesirable": 0.7, "beta": beta}
        assert num(LOSSES["kto"](policy, reference, desirable, kl, **options).sum) == pytest.approx(want)


def test_preference_losses_stay_finite_far_out():
    far = torch.tensor([1e4, -1e4])
    zero = torch.zeros(2)
    for name in ("dpo", "ipo"):
        policy = far.clone().requires_grad_()
        LOSSES[name](policy, zero, zero, zero).sum.backward()
        assert policy.grad.isfinite().all()


def test_the_log_probability_of_an_answer_is_the_sum_over_its_tokens():
    logits, targets = rand(2, 6, 5), classes(2, 6)
    targets[0, :2], targets[1, 4:] = -100, -100
    found, tokens = sequence_log_probs(logits, targets)
    log_p = logits.log_softmax(-1)
    want = [sum(num(log_p[b, t, k]) for t, k in enumerate(targets[b].tolist()) if k >= 0) for b in range(2)]
    assert found.tolist() == pytest.approx(want)
    assert tokens.tolist() == [4, 4]


# --- Combined


def test_a_weighted_sum_is_the_weighted_sum_of_the_means():
    a, b = Loss(torch.tensor(6.0), 3, {"hits": torch.tensor(2.0)}), Loss(torch.tensor(8.0), torch.tensor(2))
    total = weighted_sum({"a": a, "b": b}, {"a": 0.5, "b": 0.25})
    assert num(total.sum) / total.count == pytest.approx(0.5 * 2 + 0.25 * 4)
    assert {k: num(v) / 3 for k, v in total.terms.items()} == pytest.approx({"hits": 2 / 3, "loss_a": 2, "loss_b": 4})
    nothing = weighted_sum({"a": a, "b": Loss(torch.tensor(0.0), torch.tensor(0))}, {"a": 1.0, "b": 1.0})
    assert num(nothing.sum) == 6.0
    assert "loss_b" not in weighted_sum({"a": a, "b": b}, {"a": 1.0}).terms
    with pytest.raises(TrainerError, match="weight of 'c'"):
        weighted_sum({"a": a}, {"c": 1.0})
    with pytest.raises(TrainerError, match="at least one"):
        weighted_sum({"a": a}, {})


def test_the_parts_of_a_weighted_sum_add_up_to_it():
    x = rand(6).requires_grad_()
    parts = {"a": Loss(x.square().sum(), 6), "b": Loss(x.exp().sum(), torch.tensor(3)), "c": Loss(x.sum(), 6)}
    total = weighted_sum(parts, {"a": 0.5, "b": 2.0})
    assert list(total.parts) == ["a", "b"]
    assert num(total.parts["b"]) == pytest.approx(2 * num(x.exp().sum()) * 2)
    assert num(sum(total.parts.values())) == num(total.sum)
    twice = total.times(2.0)
    assert {name: num(part) for name, part in twice.parts.items()} == {k: 2 * num(v) for k, v in total.parts.items()}


def test_the_uncertainty_sum_is_the_papers():
    """Eq. 10 in sigma, a squared error and a cross-entropy; its slope by s vanishes where s is the log of the error."""
    sigma, errors = [0.5, 2.0], [3.0, 0.7]
    s = torch.tensor([2 * math.log(x) for x in sigma], dtype=F64, requires_grad=True)
    losses = {
        "depth": Loss(torch.tensor(errors[0] * 4, dtype=F64), 4, {"hits": torch.tensor(2.0)}),
        "label": Loss(torch.tensor(errors[1] * 8, dtype=F64), torch.tensor(8)),
    }
    total = uncertainty_sum(losses, s, squared=["depth"])
    expected = errors[0] / (2 * sigma[0] ** 2) + errors[1] / sigma[1] ** 2 + math.log(sigma[0]) + math.log(sigma[1])
    assert num(total.sum) / num(total.count) == pytest.approx(expected)
    assert num(sum(total.parts.values())) == pytest.approx(num(total.sum))
    terms = {"hits": 0.5, "loss_depth": 3.0, "loss_label": 0.7, "weight_depth": 2.0, "weight_label": 0.25}
    assert {name: num(term) / 4 for name, term in total.terms.items()} == pytest.approx(terms)
    at_best = torch.tensor([math.log(errors[0]), math.log(2 * errors[1])], dtype=F64, requires_grad=True)
    uncertainty_sum(losses, at_best, squared=["depth"]).sum.backward()
    assert at_best.grad.tolist() == pytest.approx([0, 0], abs=1e-12)
    with pytest.raises(TrainerError, match="squared names 'dept'"):
        uncertainty_sum(losses, s, squared=["dept"])
    with pytest.raises(TrainerError, match=r"the shape \[3\], and there are 2 losses"):
        uncertainty_sum(losses, torch.zeros(3))


@rounds("norm", [0.0, 1.0])
def test_the_gradient_penalty_is_the_papers_and_trains_the_model(norm):
    """Of f(x) = w x the slope is w for every sample: (|w| - norm)^2, with gradient 2 (|w| - norm) w/|w|."""
    w, x = rand(4).requires_grad_(), rand(7, 4, seed=2).requires_grad_()
    loss = gradient_penalty(x @ w, x, norm=norm)
    length = num(w.detach().norm())
    assert (num(loss.sum), loss.count) == pytest.approx((7 * (length - norm) ** 2, 7))
    (slope,) = torch.autograd.grad(loss.sum, w)
    torch.testing.assert_close(slope, 7 * 2 * (length - norm) * w.detach() / length)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    assert torch.autograd.gradcheck(lambda x: gradient_penalty(net(x), x, norm=norm).sum, (x,))


def test_a_flat_function_has_a_finite_penalty():
    x = rand(3, 2).requires_grad_()
    w = torch.zeros(2, dtype=F64, requires_grad=True)
    loss = gradient_penalty(x @ w, x)
    loss.sum.backward()
    assert num(loss.sum) == 3.0 and w.grad.isfinite().all()


# --- The guide


def test_the_guide_lists_every_loss_with_its_options_and_defaults():
    lines = re.findall(r"^\| (`\w+` \|.*) \|$", GUIDE.read_text(), re.MULTILINE)
    table = [[cell.strip(" `") for cell in line.split("|")] for line in lines]
    assert [row[0] for row in table] == list(LOSSES)
    for name, _, options, _, adds_up, _ in table:
        found = dict(re.findall(r"`?(\w+)` ([^,]+)", options))
        signature = inspect.signature(LOSSES[name]).parameters.values()
        tensors = {"kl", "times", "groups"}
        wanted = {p.name: p.default for p in signature if p.kind is p.KEYWORD_ONLY and p.name not in tensors}
        shown = {key: "none" if value is None else str(value) for key, value in wanted.items()}
        assert {key: value.replace(";", ",") for key, value in found.items()} == shown, name
        assert adds_up.startswith("yes") == (name in ADDITIVE), name
