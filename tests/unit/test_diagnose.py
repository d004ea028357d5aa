"""Diagnosis against models whose illness is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from trainer.diagnose import curves, flow
from trainer.diagnose.flow import advice, gradient_flow
from trainer.diagnose.landscape import direction, landscape, sharpness
from trainer.diagnose.range_test import range_test, rates
from trainer.task import Loss


def squares(model, batch):
    x, y = batch
    return Loss(((model(x) - y) ** 2).sum(), len(x))


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)) for _ in range(2)]


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def test_gradient_and_update_of_a_layer_are_those_of_the_whole_window(batches):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    before = [p.clone() for p in model.parameters()]
    first, last = gradient_flow(model, sgd(model), squares, batches)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    (squares(model, (x, y)).sum / len(x)).backward()
    for layer, module in ((first, model[0]), (last, model[2])):
        gradient = torch.cat([module.weight.grad.flatten(), module.bias.grad]).double()
        weight = torch.cat([module.weight.detach().flatten(), module.bias.detach()]).double()
        assert layer.gradient == pytest.approx(gradient.square().mean().sqrt().item(), rel=1e-5)
        assert layer.update_ratio == pytest.approx(
            0.1 * layer.gradient / weight.square().mean().sqrt().item(), rel=1e-4
        )
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_deep_sigmoid_stack_vanishes_and_a_residual_one_does_not(batches):
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Sigmoid())

        def forward(self, x):
            return x + self.inner(x)

    plain = nn.Sequential(*[m for _ in range(10) for m in (nn.Linear(8, 8), nn.Sigmoid())], nn.Linear(8, 4))
    residual = nn.Sequential(*[Block() for _ in range(10)], nn.Linear(8, 4))
    assert "gradients vanish in 0, 2, 4" in "\n".join(advice(gradient_flow(plain, sgd(plain, 1e-3), squares, batches)))
    assert "vanish" not in "\n".join(advice(gradient_flow(residual, sgd(residual, 1e-3), squares, batches)))


def test_dead_units_are_counted_behind_the_layer_that_feeds_them(batches):
    model = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 4))
    with torch.no_grad():
        model[0].bias[:3] = -1e6
        model[0].bias[3:] = 1e6
    first, last = gradient_flow(model, sgd(model, 1e-9), squares, batches)
    assert first.dead == pytest.approx(0.3)
    assert last.dead is None
    assert "30" not in advice([last]) and any("never active" in one for one in advice([first]))


def test_channels_of_a_convolution_are_its_units():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    batch = (torch.randn(5, 1, 6, 6), torch.randn(5, 4))
    model(batch[0])
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.copy_(torch.tensor([-1.0, 1.0, 1.0, 1.0]))
    assert gradient_flow(model, sgd(model), squares, [batch])[0].dead == pytest.approx(0.25)


@pytest.mark.parametrize(("lr", "words"), [(1e-9, "raise train.optim.lr"), (10.0, "lower train.optim.lr")])
def test_a_rate_that_is_far_off_shows_in_the_updates(batches, lr, words):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    assert any(words in one for one in advice(gradient_flow(model, sgd(model, lr), squares, batches)))


def test_the_landscape_of_a_linear_model_is_its_parabola(batches):
    torch.manual_seed(0)
    model = nn.Linear(8, 4, bias=False)
    found = landscape(model, squares, batches, points=5, seed=3)
    x, y = (torch.cat(parts).double() for parts in zip(*batches, strict=True))
    w = model.weight.detach().double()
    from trainer.seeding import derive

    [d] = direction([model.weight.detach()], derive(3, "landscape", 0))
    expected = [(((x @ (w + t * d.double()).T) - y) ** 2).sum().item() / len(x) for t in found.offsets]
    assert found.offsets == [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert found.losses == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(d.norm(dim=1), w.norm(dim=1).float())
    rise = (expected[1] + expected[3]) / 2 - expected[2]
    assert sharpness(found) == pytest.approx(rise / expected[2], rel=1e-4)


def test_a_landscape_of_two_directions_is_a_grid_around_the_model(batches):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    found = landscape(model, squares, batches, dims=2, points=3)
    model.eval()
    loss = sum(squares(model, b).sum.item() for b in batches) / 32
    assert [len(row) for row in found.losses] == [3, 3, 3]
    assert found.losses[1][1] == pytest.approx(loss, rel=1e-6)


def test_the_range_ends_at_both_rates():
    assert list(rates(1e-4, 1.0, 5)) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])


def test_the_range_test_finds_where_a_quadratic_is_learned_and_where_it_diverges():
    weight = [1.0]

    def train(lr: float) -> float:  # gradient descent on w^2 / 2 diverges above lr = 2
        loss = weight[0] ** 2 / 2 + 0.01
        weight[0] -= lr * weight[0]
        return loss

    found = range_test(train, 1e-4, 1e4, 160)
    assert found.lrs[-1] < 1e4, "it ends once the loss has diverged"
    assert found.suggestion is not None and 0.01 < found.suggestion < 2
    assert found.cautious is not None and found.cautious < 2


def test_a_loss_that_never_falls_suggests_nothing():
    found = range_test(lambda lr: 1.0 + lr, 1e-4, 1.0, 50)
    assert (found.suggestion, found.cautious) == (None, None)


def falling(n, floor=0.0, rate=0.3):
    return [floor + math.exp(-rate * epoch) for epoch in range(n)]


@pytest.mark.parametrize(
    ("train", "validation", "verdict"),
    [
        (falling(30), [max(0.3, math.exp(-0.3 * e)) + 0.02 * max(0, e - 8) for e in range(30)], "overfitting"),
        (falling(30, 0.2), falling(30, 0.4), "overfitting"),
        (falling(12, rate=0.1), falling(12, rate=0.1), "underfitting"),
        (falling(40, 0.3, 0.9), [v + 1e-9 * e for e, v in enumerate(falling(40, 0.31, 0.9))], "plateau"),
        (falling(30, 0.3, 0.18), falling(30, 0.31, 0.18), "healthy"),
        ([1.0] * 5, [1.0] * 5, "too short"),
    ],
)
def test_curves_get_the_verdict_they_were_made_for(train, validation, verdict):
    found = curves.judge(train, validation)
    assert found.verdict == verdict, found


def test_names_are_few():
    layer = flow.Layer("a", 1.0, 0.0, 1e-3, None)
    big = flow.Layer("big", 1.0, 1.0, 1e-3, None)
    text = advice([big, *[flow.Layer(f"l{i}", 1.0, 0.0, 1e-3, None) for i in range(9)], layer])
    assert "l0, l1, l2 and 7 more" in text[0]
