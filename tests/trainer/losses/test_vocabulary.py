"""The loss in blocks against torch's own cross-entropy of all logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.losses import vocabulary
from trainer.losses.vocabulary import in_blocks, linear_cross_entropy
from trainer.runtime.second_order import twice


def given(dtype=torch.float64, tokens=23, width=8, classes=37):
    torch.manual_seed(0)
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, width, dtype=dtype, requires_grad=True)
    targets = torch.randint(classes, (tokens,))
    targets[[0, 5, -1]] = -100
    return x, weight, targets


def plain(x, weight, targets, label_smoothing=0.0, z_loss=0.0):
    logits = F.linear(x, weight)
    loss = F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="sum", ignore_index=-100)
    return loss + z_loss * logits.logsumexp(-1).square()[targets != -100].sum()


@pytest.mark.parametrize("block", [1, 5, 23, 100])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.3}, {"label_smoothing": 0.2, "z_loss": 1e-2}]
)
def test_blocks_add_up_to_the_plain_loss_and_its_gradients(block, options):
    x, weight, targets = given()
    ours, oracle = (
        linear_cross_entropy(x, weight, targets, block=block, **options),
        plain(x, weight, targets, **options),
    )
    assert ours.count == 20
    torch.testing.assert_close(ours.sum, oracle, rtol=1e-13, atol=1e-12)
    mine = torch.autograd.grad(3 * ours.sum, (x, weight))
    theirs = torch.autograd.grad(3 * oracle, (x, weight))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_in_half_precision_it_is_as_near_to_float64_as_the_plain_loss():
    x, weight, targets = given(torch.float32, tokens=256, width=64, classes=500)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    oracle = torch.autograd.grad(plain(*exact, targets), exact)
    errors = []
    for loss in (
        lambda: linear_cross_entropy(x, weight, targets, block=64).sum,
        lambda: F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum"),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            gradients = torch.autograd.grad(loss(), (x, weight))
        assert all(g.dtype == torch.float32 for g in gradients)
        errors.append([float((g - o).norm() / o.norm()) for g, o in zip(gradients, oracle, strict=True)])
    assert all(mine < 1.1 * theirs for mine, theirs in zip(*errors, strict=True))


class Largest(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that is computed."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(result)
        self.elements = max([self.elements, *(t.numel() for t in leaves if isinstance(t, torch.Tensor))])
        return result


def test_the_logits_of_a_block_are_the_most_that_it_holds():
    x, weight, targets = given(tokens=200, classes=300)
    with Largest() as largest:
        linear_cross_entropy(x, weight, targets, block=20).sum.backward()
    assert largest.elements == 20 * 300


def test_few_logits_are_computed_at_once_to_the_bit():
    x, weight, targets = given(torch.float32)
    assert not in_blocks(*F.linear(x, weight).shape)
    ours = linear_cross_entropy(x, weight, targets)
    assert torch.equal(ours.sum, plain(x, weight, targets))


def test_what_is_differentiated_twice_or_vectorised_is_computed_plainly(monkeypatch):
    monkeypatch.setattr(vocabulary, "LARGE", 1)
    x, weight, targets = given(tokens=6)

    def slope(loss):
        [first] = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    with twice("optim.name=sophia", "choose another"):
        torch.testing.assert_close(
            slope(linear_cross_entropy(x, weight, targets).sum), slope(plain(x, weight, targets))
        )
    several = torch.vmap(lambda row: linear_cross_entropy(row, weight, targets).sum)(torch.stack([x, 2 * x]))
    torch.testing.assert_close(several, torch.stack([plain(x, weight, targets), plain(2 * x, weight, targets)]))
