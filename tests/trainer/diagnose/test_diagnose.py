"""Diagnosis against models whose illness is known."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from rounds import rounds
from torch import nn

from trainer.diagnose import curves, flow
from trainer.diagnose.flow import gradient_flow
from trainer.diagnose.landscape import Landscape, direction, finding, landscape
from trainer.diagnose.range_test import range_test, rates
from trainer.gradients.accumulate import accumulate
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


def measured(model, optimizer, batches, steps=1):
    """The layers of `model` over `steps` optimizer steps on the one window that `batches` make."""

    def step():
        optimizer.zero_grad()
        window = accumulate(batches, lambda _, batch: squares(model, batch))
        for p in model.parameters():
            p.grad.div_(window.count)
        optimizer.step()

    return gradient_flow(model, step, steps)


def verdicts(layers):
    return {one.check: one.verdict for one in flow.findings(layers)}


def advice(layers):
    return "\n".join(one.advice for one in flow.findings(layers))


def test_gradient_and_update_of_a_layer_are_those_of_the_whole_window(batches):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    before = copy.deepcopy(model)
    first, last = measured(model, sgd(model), batches)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    (squares(before, (x, y)).sum / len(x)).backward()
    for layer, module in ((first, before[0]), (last, before[2])):
        gradient = torch.cat([module.weight.grad.flatten(), module.bias.grad]).double()
        weight = torch.cat([module.weight.detach().flatten(), module.bias.detach()]).double()
        assert layer.gradient == pytest.approx(gradient.square().mean().sqrt().item(), rel=1e-5)
        assert layer.weight == pytest.approx(weight.square().mean().sqrt().item(), rel=1e-6)
        assert layer.update_ratio == pytest.approx(0.1 * layer.gradient / layer.weight, rel=1e-4)


def test_several_steps_give_the_mean_of_each(batches):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4))
    one_by_one = copy.deepcopy(model)
    optimizer = sgd(one_by_one)
    each = [measured(one_by_one, optimizer, batches)[0] for _ in range(3)]
    [found] = measured(model, sgd(model), batches, steps=3)
    for name in ("weight", "gradient", "update_ratio"):
        assert getattr(found, name) == pytest.approx(sum(getattr(one, name) for one in each) / 3)


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
    layers = measured(plain, sgd(plain, 1e-3), batches)
    assert verdicts(layers)["gradient flow"] == "vanishing"
    assert "gradients vanish in 0, 2, 4" in advice(layers)
    assert verdicts(measured(residual, sgd(residual, 1e-3), batches))["gradient flow"] == "healthy"


def test_dead_units_are_counted_behind_the_layer_that_feeds_them(batches):
    model = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 4))
    with torch.no_grad():
        model[0].bias[:3] = -1e6
        model[0].bias[3:] = 1e6
    first, last = measured(model, sgd(model, 1e-9), batches)
    assert first.dead == pytest.approx(0.3)
    assert last.dead is None
    assert verdicts([last])["dead units"] == "not measured"
    assert verdicts([first, last])["dead units"] == "dead units" and "units behind 0 have died" in advice([first])
    assert "use GELU in place of ReLU" in advice([first])


def test_advice_on_dead_units_is_about_the_activation_in_use(batches):
    model = nn.Sequential(nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 4))
    with torch.no_grad():
        model[0].bias[:3] = -1e6
    found = advice(measured(model, sgd(model, 1e-9), batches))
    assert "normalise what GELU is given" in found and "in place of" not in found


def test_only_the_step_size_says_in_which_direction_the_rate_is_off(batches):
    """Dead units beside steps that are too small, and curves that still fall beside steps that are too large."""
    model = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 4))
    with torch.no_grad():
        model[0].bias[:3] = -1e6
    found = advice(measured(model, sgd(model, 1e-9), batches))
    assert "have died" in found and "raise train.optim.lr" in found and "lower" not in found
    falling = [1 / epoch for epoch in range(1, 10)]
    assert next(one.verdict for one in curves.findings(falling, falling)) == "underfitting"
    assert not any("raise train.optim.lr" in one.advice for one in curves.findings(falling, falling))


def test_the_mean_and_the_spread_of_outputs_are_of_all_passes(batches):
    model = nn.Sequential(nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 4))
    with torch.no_grad():
        hidden = torch.cat([model[0](x) for x, _ in batches]).double()
    first, _ = measured(model, sgd(model, 1e-9), batches)
    assert first.output_mean == pytest.approx(hidden.mean().item(), abs=1e-5)
    assert first.output_std == pytest.approx(hidden.std(unbiased=False).item(), rel=1e-4)


def test_channels_of_a_convolution_are_its_units():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    batch = (torch.randn(5, 1, 6, 6), torch.randn(5, 4))
    model(batch[0])
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.copy_(torch.tensor([-1.0, 1.0, 1.0, 1.0]))
    assert measured(model, sgd(model), [batch])[0].dead == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("lr", "verdict", "words"),
    [
        (1e-9, "too small", "raise train.optim.lr"),
        (1e-3, "healthy", ""),
        (10.0, "too large", "lower train.optim.lr"),
    ],
)
def test_a_rate_that_is_far_off_shows_in_the_updates(batches, lr, verdict, words):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    layers = measured(model, sgd(model, lr), batches)
    assert verdicts(layers)["update ratio"] == verdict
    assert words in advice(layers)


def test_the_landscape_of_a_linear_model_is_its_parabola(batches):
    torch.manual_seed(0)
    model = nn.Linear(8, 4, bias=False)
    found = landscape(model, squares, batches, points=5, seed=3)
    x, y = (torch.cat(parts).double() for parts in zip(*batches, strict=True))
    w = model.weight.detach().double()
    from trainer.runtime.seeding import derive

    [d] = direction([model.weight.detach()], derive(3, "landscape", 0))
    expected = [(((x @ (w + t * d.double()).T) - y) ** 2).sum().item() / len(x) for t in found.offsets]
    assert found.offsets == [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert found.losses == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(d.norm(dim=1), w.norm(dim=1).float())


def test_a_landscape_of_two_directions_is_a_grid_around_the_model(batches):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    found = landscape(model, squares, batches, dims=2, points=3)
    model.eval()
    loss = sum(squares(model, b).sum.item() for b in batches) / 32
    assert [len(row) for row in found.losses] == [3, 3, 3]
    assert found.losses[1][1] == pytest.approx(loss, rel=1e-6)


def around(along, untrained):
    """What is said of a landscape whose losses are `along` the first direction, and the same all along the second."""
    offsets = [-1.0, -0.5, 0.0, 0.5, 1.0]
    found = Landscape(offsets, [[along(x) for _ in offsets] for x in offsets])
    return finding(found, untrained)


def test_a_landscape_is_judged_in_shares_of_what_was_gained():
    """Along the first direction the loss rises by `rise` half way; along the second it does not."""
    for rise, verdict in ((0.2, "healthy"), (1.2, "sharp")):
        found = around(lambda x, rise=rise: 1 + rise * (x / 0.5) ** 2, untrained=2.0)
        assert (found.verdict, found.value) == (verdict, pytest.approx(rise / 2))
        tenfold = around(lambda x, rise=rise: 10 + 10 * rise * (x / 0.5) ** 2, untrained=20.0)
        assert tenfold.value == pytest.approx(found.value)


def test_a_landscape_that_falls_on_one_side_is_a_slope():
    found = around(lambda x: 1 + 0.1 * x, untrained=2.0)
    assert (found.verdict, found.value) == ("on a slope", pytest.approx(0.1))


@rounds(("loss", "untrained"), [(2.0, 2.0), (2.1, 2.0), (1.999, 2.0), (math.nan, 2.0)])
def test_a_landscape_around_what_has_learned_nothing_says_so(loss, untrained):
    assert around(lambda x: loss, untrained).verdict == "nothing learned"


def test_the_range_ends_at_both_rates():
    assert list(rates(1e-4, 1.0, 5)) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])


def test_the_range_test_finds_where_a_quadratic_learns_and_diverges():
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


@rounds(
    ("train", "validation", "fit", "plateau"),
    [
        (
            falling(30),
            [max(0.3, math.exp(-0.3 * e)) + 0.02 * max(0, e - 8) for e in range(30)],
            "overfitting",
            "plateau",
        ),
        (falling(30, 0.2), falling(30, 0.4), "overfitting", "plateau"),
        (falling(12, rate=0.1), falling(12, rate=0.1), "underfitting", "healthy"),
        ([1.0 - 1e-4 * e for e in range(20)], [1.0] * 20, "underfitting", "plateau"),
        (falling(40, 0.3, 0.9), [v + 1e-9 * e for e, v in enumerate(falling(40, 0.31, 0.9))], "healthy", "plateau"),
        (falling(30, 0.3, 0.18), falling(30, 0.31, 0.18), "healthy", "healthy"),
        ([1.0] * 5, [1.0] * 5, "not measured", "not measured"),
        ([math.nan] * 8, [1.0] * 8, "not measured", "not measured"),
        (falling(12, rate=0.1), [math.nan] * 11 + [0.3], "underfitting", "healthy"),
    ],
)
def test_curves_get_the_verdicts_they_were_made_for(train, validation, fit, plateau):
    found = curves.findings(train, validation)
    assert [one.verdict for one in found] == [fit, plateau], found


def test_an_epoch_is_called_by_its_own_number():
    """Of a run that goes on from epoch 20, and where the least loss lies within the epochs that brought little."""
    epochs = range(21, 33)
    risen = [1.0, 0.5, 0.4, *(0.4 + 0.1 * e for e in range(1, 10))]
    fit, still = curves.findings(falling(12), risen, epochs)
    assert epochs[curves.best(risen)] == 23
    assert "since epoch 23: stop there" in fit.advice and "since epoch 23: stop there" in still.advice
    flat = [*[1.0] * 9, 0.9999, *[1.0] * 2]
    _, still = curves.findings(falling(12), flat, epochs)
    assert "since epoch 28 (the least loss is epoch 30's): stop there" in still.advice


def test_names_are_few():
    layers = [flow.Layer("big", 1.0, 1.0, 1e-3, None), *[flow.Layer(f"l{i}", 1.0, 0.0, 1e-3, None) for i in range(10)]]
    assert "l0, l1, l2 and 7 more" in advice(layers)
