"""Accumulation by global count, clipping, and what the guard lets through."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainer.config import ClipConfig, GuardConfig
from trainer.errors import TrainerError
from trainer.gradients.accumulate import accumulate, divide_and_clip, divide_and_clip_unread
from trainer.metrics.meter import Meter
from trainer.runtime.window import Window
from trainer.task import Loss

UNCLIPPED = ClipConfig(norm=None)


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(23, 5, dtype=torch.float64, generator=generator), torch.randint(3, (23,), generator=generator)


def loss_of(net):
    def loss(i, batch) -> Loss:
        x, y = batch
        out = net(x)
        return Loss(cross_entropy(out, y, reduction="sum"), len(y), {"right": (out.argmax(1) == y).sum()})

    return loss


def clipped(net: nn.Module, count: float | torch.Tensor, clip: ClipConfig, *, wait: bool) -> float:
    """Divides and clips the gradients as on a CPU or, without waiting, as on a GPU; returns their norm between."""
    if wait:
        return divide_and_clip(list(net.parameters()), count, clip)
    norm, divisor = divide_and_clip_unread(list(net.parameters()), count, clip)
    return norm.item() / divisor


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("sizes", [[23], [10, 10, 3], [1, 22], [5] * 4 + [3]])
def test_uneven_micro_batches_give_the_large_batchs_gradient(sizes, wait, net, data):
    x, y = data
    large = copy.deepcopy(net)
    cross_entropy(large(x), y).backward()
    window = accumulate(list(zip(x.split(sizes), y.split(sizes), strict=True)), loss_of(net))
    norm = clipped(net, window.count, UNCLIPPED, wait=wait)
    for p, q in zip(net.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)
    assert float(norm) == pytest.approx(float(nn.utils.get_total_norm([q.grad for q in large.parameters()])))
    assert float(window.loss) / window.count == pytest.approx(cross_entropy(large(x), y).item())
    assert window.terms["right"] == (large(x).argmax(1) == y).sum()


def test_the_mean_of_means_would_be_another_gradient(net, data):
    """The error that division by the global count avoids."""
    x, y = data
    large = copy.deepcopy(net)
    cross_entropy(large(x), y).backward()
    for i in (slice(22), slice(22, 23)):
        (cross_entropy(net(x[i]), y[i]) / 2).backward()
    assert (net[0].weight.grad - large[0].weight.grad).abs().max() > 1e-3


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("counted", [float, torch.tensor])
@pytest.mark.parametrize("limit", [1e-3, 0.5, 1.0, 1e3])
def test_clipping_by_norm_is_torchs(limit, counted, wait, net, data):
    other = copy.deepcopy(net)
    cross_entropy(other(data[0]), data[1]).backward()
    expected = nn.utils.clip_grad_norm_(other.parameters(), limit)
    window = accumulate([data], loss_of(net))
    norm = clipped(net, counted(window.count), ClipConfig(norm=limit), wait=wait)
    assert float(norm) == pytest.approx(float(expected))
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-14)


def test_clipping_by_value_comes_after_the_division(net, data):
    other = copy.deepcopy(net)
    cross_entropy(other(data[0]), data[1]).backward()
    nn.utils.clip_grad_value_(other.parameters(), 0.01)
    window = accumulate([data], loss_of(net))
    clipped(net, window.count, ClipConfig(norm=None, value=0.01), wait=True)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert max(p.grad.abs().max() for p in net.parameters()) == 0.01


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0)])
def test_a_count_of_zero_gives_no_finite_norm(count, wait, net, data):
    window = accumulate([data], lambda i, batch: Loss(net(batch[0]).sum() * 0, count))
    norm = clipped(net, window.count, ClipConfig(), wait=wait)
    assert not math.isfinite(norm)


def test_an_empty_micro_batch_may_have_no_graph(net, data):
    empty = Loss(torch.tensor(0.0), 0)
    window = accumulate([None, data], lambda i, batch: empty if batch is None else loss_of(net)(i, batch))
    assert window.count == 23
    assert not math.isfinite(divide_and_clip([nn.Parameter(torch.ones(1))], 0, ClipConfig()))


def test_a_loss_without_gradient_is_refused(net, data):
    with pytest.raises(TrainerError, match="without a gradient"):
        accumulate([data], lambda i, batch: Loss(net(batch[0]).sum().detach(), 3))


# The meter


def window(loss: float, count: float = 4, **terms: float) -> Window:
    return Window(torch.tensor(loss), count, {name: torch.tensor(value) for name, value in terms.items()})


def test_means_are_over_the_global_count_and_over_steps():
    meter = Meter(ClipConfig(norm=1.0), GuardConfig())
    meter.add(0, window(8.0, 4, hits=1.0), torch.tensor(0.5))
    meter.add(0, window(1.0, 1, hits=1.0), torch.tensor(1.5))
    assert meter.drain() == [True, True]
    assert meter.metrics() == {
        "train/skipped_steps": 0,
        "train/empty_steps": 0,
        "train/loss": 9 / 5,
        "train/grad_norm": 1.0,
        "train/clipped": 0.5,
        "train/hits": 2 / 5,
    }


def test_a_term_that_begins_within_the_epoch_averages_its_own_windows():
    meter = Meter(ClipConfig(), GuardConfig())
    meter.add(0, window(8.0, 4), torch.tensor(0.5))
    meter.add(0, window(1.0, 2, rank_ic=1.0), torch.tensor(0.5))
    meter.drain()
    assert meter.metrics()["train/rank_ic"] == 1 / 2


def test_when_windows_are_read_changes_nothing():
    values = torch.rand(50, generator=torch.Generator().manual_seed(0)).tolist()
    at_once, one_by_one = (Meter(ClipConfig(), GuardConfig()) for _ in range(2))
    for value in values:
        for meter in (at_once, one_by_one):
            meter.add(0, window(value), torch.tensor(value))
        one_by_one.drain()
    at_once.drain()
    assert at_once.state() == one_by_one.state()


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0), (1.0, math.inf)])
def test_what_is_not_finite_is_counted_and_enters_no_mean(loss, norm):
    meter = Meter(ClipConfig(), GuardConfig(max_consecutive=2))
    for bad in (True, False, True, True):
        meter.add(0, window(loss) if bad else window(2.0), torch.tensor(norm if bad else 3.0))
    assert not meter.gave_up
    assert meter.drain() == [False, True, False, False]
    assert (meter.consecutive, meter.gave_up) == (2, True)
    metrics = meter.metrics()
    assert (metrics["train/skipped_steps"], metrics["train/loss"], metrics["train/grad_norm"]) == (3, 0.5, 3.0)


def test_nothing_trained_on_is_nan_and_never_zero():
    meter = Meter(ClipConfig(), GuardConfig(max_consecutive=1))
    meter.add(0, window(0.0, 0), torch.tensor(math.nan))
    assert meter.drain() == [False]
    assert not meter.gave_up
    assert math.isnan(meter.metrics()["train/loss"])
    assert meter.metrics()["train/empty_steps"] == 1


@pytest.mark.parametrize("name", ["loss", "lr", "grad_norm"])
def test_a_term_may_not_take_a_name_of_the_trainers(name):
    meter = Meter(ClipConfig(), GuardConfig())
    meter.add(0, Window(torch.tensor(1.0), 4, {name: torch.tensor(1.0)}), torch.tensor(1.0))
    meter.drain()
    with pytest.raises(TrainerError, match=f"term named {name!r}"):
        meter.metrics()
