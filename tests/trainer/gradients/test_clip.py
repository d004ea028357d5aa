"""Each rule for the gradient against its formula in float64, their order, and the gradient noise scale."""

from __future__ import annotations

import math
import re

import pytest
import torch
from places import ROOT
from pydantic import ValidationError
from torch import nn

from trainer.config import ClipConfig, GradientConfig, GuardConfig, TrainConfig
from trainer.errors import ConfigError
from trainer.gradients.accumulate import NoiseProbe, accumulate
from trainer.gradients.clip import (
    GradientRules,
    add_noise_,
    centralize_,
    clip_adaptive_,
    clip_each_,
    normalize_,
    unit_norms,
)
from trainer.metrics.meter import Meter
from trainer.runtime.window import Window
from trainer.task import Loss

SHAPES = [(4, 3), (2, 3, 2, 2), (5,), ()]


def tensors(seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, dtype=torch.float64, generator=generator) for shape in SHAPES]


def units(x: torch.Tensor) -> list[torch.Tensor]:
    """The parts of x that one rule treats as one."""
    return [*x] if x.ndim > 1 else [x]


def test_centralisation_takes_each_units_mean_off():
    grads = tensors(0)
    centralize_(grads)
    for before, after in zip(tensors(0), grads, strict=True):
        for a, b in zip(units(before), units(after), strict=True):
            torch.testing.assert_close(b, a - a.mean() if before.ndim > 1 else a)


@pytest.mark.parametrize("which", ["global", "parameter"])
def test_normalisation_gives_norm_one(which):
    grads, before = tensors(1), tensors(1)
    normalize_(grads, which)
    norm = math.sqrt(sum(float(g.square().sum()) for g in before))
    for a, b in zip(before, grads, strict=True):
        torch.testing.assert_close(b, a / (norm if which == "global" else a.norm()), rtol=1e-5, atol=0)


def test_a_gradient_of_zero_stays_zero():
    for rule in (lambda g: normalize_(g, "parameter"), lambda g: clip_each_(g, 1.0), centralize_):
        grads = [torch.zeros(2, 3), torch.zeros(4)]
        rule(grads)
        assert all((g == 0).all() for g in grads)
    grads = [torch.zeros(2, 3)]
    clip_adaptive_([torch.zeros(2, 3)], grads, 0.01, 1e-3)
    assert (grads[0] == 0).all()


def test_clipping_per_parameter_is_torchs_on_each_alone():
    grads = tensors(2)
    clip_each_(grads, 0.7)
    for before, after in zip(tensors(2), grads, strict=True):
        p = nn.Parameter(torch.zeros_like(before))
        p.grad = before
        nn.utils.clip_grad_norm_([p], 0.7)
        torch.testing.assert_close(after, p.grad)


@pytest.mark.parametrize("limit", [0.01, 0.5, 100.0])
def test_adaptive_clipping_is_equation_3(limit):
    """Brock et al. 2021: G_i <- limit |W_i|* / |G_i| G_i where |G_i| / |W_i|* > limit, |W_i|* = max(|W_i|, eps)."""
    weights, grads, eps = tensors(3), tensors(4, 3.0), 1e-3
    weights[0][1] = 0.0  # a unit that only eps lets move
    clip_adaptive_(weights, grads, limit, eps)
    for w, before, after in zip(weights, tensors(4, 3.0), grads, strict=True):
        for w_i, g_i, found in zip(units(w), units(before), units(after), strict=True):
            star = max(float(w_i.norm()), eps)
            clipped = float(g_i.norm()) / star > limit
            torch.testing.assert_close(found, limit * star / g_i.norm() * g_i if clipped else g_i)


def test_units_are_rows_and_filters():
    assert [tuple(unit_norms(x).shape) for x in tensors(0)] == [(4, 1), (2, 1, 1, 1), (1,), ()]


def test_noise_has_the_papers_variance_and_is_a_function_of_the_step():
    """Neelakantan et al. 2015, eq. 1: variance eta / (1 + t)^gamma."""
    draws = [[torch.zeros(200_000, dtype=torch.float64)] for _ in range(3)]
    for grads, step in zip(draws, (7, 7, 8), strict=True):
        add_noise_(grads, eta=0.3, decay=0.55, step=step, seed=1)
    (a,), (again,), (other,) = draws
    assert torch.equal(a, again)
    assert abs(torch.corrcoef(torch.stack([a, other]))[0, 1]) < 0.01
    assert a.var().item() == pytest.approx(0.3 / 8**0.55, rel=0.02)


# --- Together


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def window_of(net, seed: int = 0, count: float = 4.0) -> Window:
    """A window whose gradients are summed, not yet divided."""
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = count * 3 * torch.randn(p.shape, dtype=p.dtype, generator=generator)
    return Window(torch.tensor(1.0), count, {})


def rules(net, clip=None, gradients=None, **others) -> GradientRules:
    config = TrainConfig(clip=ClipConfig(**(clip or {})), gradients=GradientConfig(**(gradients or {})), **others)
    return GradientRules(net, list(net.parameters()), config)


@pytest.mark.parametrize("wait", [True, False])
def test_the_rules_come_in_the_order_told(net, wait):
    window = window_of(net)
    raw = [p.grad / 4.0 for p in net.parameters()]
    clip = {"per_parameter": 0.9, "adaptive": 0.4, "norm": 0.8, "value": 0.2}
    gradients = {"centralize": True, "normalize": "global", "noise": 0.01}
    norm = rules(net, clip, gradients, seed=5).apply(window, 3, wait=wait)
    expected = [g.clone() for g in raw]
    centralize_(expected)
    normalize_(expected, "global")
    clip_each_(expected, 0.9)
    clip_adaptive_([p.detach() for p in net.parameters()], expected, 0.4, 1e-3)
    met = nn.utils.get_total_norm(expected)
    expected = [(g * min(1.0, 0.8 / (met + 1e-6))).clamp(-0.2, 0.2) for g in expected]
    add_noise_(expected, 0.01, 0.55, 3, 5)
    for p, g in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)
    assert float(norm) == pytest.approx(float(nn.utils.get_total_norm(raw)))
    assert isinstance(norm, float) == wait
    assert float(window.met) == pytest.approx(float(met))


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("gradients", [{}, {"centralize": True}, {"normalize": "parameter"}])
@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0)])
def test_an_empty_window_gives_no_finite_norm(net, gradients, count, wait):
    window = window_of(net)
    window.count = count
    assert not math.isfinite(rules(net, gradients=gradients).apply(window, 0, wait=wait))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(net, bad):
    window = window_of(net)
    net[0].bias.grad[0] = bad
    everything = rules(net, {"per_parameter": 1.0, "adaptive": 0.1}, {"normalize": "global", "centralize": True})
    assert not math.isfinite(everything.apply(window, 0, wait=True))


def test_the_last_layer_is_left_out_by_its_name(net):
    window = window_of(net)
    last = [p.grad / 4.0 for p in net[2].parameters()]
    rules(net, {"adaptive": 1e-4, "adaptive_exclude": ("2.*",), "norm": None}).apply(window, 0, wait=True)
    for p, g in zip(net[2].parameters(), last, strict=True):
        torch.testing.assert_close(p.grad, g)
    most = 1e-4 * unit_norms(net[0].weight).clamp(min=1e-3)
    assert (unit_norms(net[0].weight.grad) <= most * (1 + 1e-9)).all()
    with pytest.raises(
        ConfigError, match=r"matches no parameter; the model's last ones are 0.bias, 2.weight, 2.bias: give a pattern"
    ):
        rules(net, {"adaptive": 0.1, "adaptive_exclude": ("head.*",)})


def test_clipped_counts_what_clipping_by_norm_met(net):
    """A gradient that normalisation has brought to norm 1 is not clipped at 1.1, however large it was."""
    meter = Meter(ClipConfig(norm=1.1), GuardConfig())
    for gradients in ({"normalize": "global"}, {}):
        window = window_of(net)
        norm = rules(net, {"norm": 1.1}, gradients).apply(window, 0, wait=True)
        meter.add(0, window, norm)
    meter.drain()
    assert norm > 5
    assert meter.metrics()["train/clipped"] == 0.5
    assert meter.metrics()["train/grad_norm"] == pytest.approx(norm)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"clip": {"adaptive_eps": 0.1}}, r"adaptive_eps=0.1 is read only with clip\.adaptive:"),
        (
            {"clip": {"adaptive_exclude": ["head"]}},
            r"is read only with clip\.adaptive: set that, or leave clip\.adaptive_exclude out",
        ),
        ({"gradients": {"noise_decay": 0.1}}, r"noise_decay=0.1 is read only with gradients\.noise:"),
        ({"gradients": {"noise_scale": True}}, "set micro_batch_size below batch_size=32"),
    ],
)
def test_what_would_be_ignored_is_refused(given, message):
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate(given)


# --- The noise scale


def quadratic(theta):
    """0.5 |theta - x|^2 summed: its gradient for one sample is theta - x, so G = theta - mu and Sigma that of x."""
    return lambda i, batch: Loss(0.5 * (theta - batch).square().sum(), len(batch))


@pytest.mark.parametrize("sizes", [[8] * 4, [16, 8, 4, 3, 1]])
def test_the_noise_scale_of_a_known_model(sizes):
    """tr(Sigma)/|G|^2 = (1 + 4 + 9 + 0.25)/(1 + 1 + 4 + 0.25) = 2.28, from micro-batches of any sizes."""
    generator = torch.Generator().manual_seed(0)
    deviations = torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.float64)
    theta = nn.Parameter(torch.tensor([1.0, -1.0, 2.0, 0.5], dtype=torch.float64))
    probe, meter = NoiseProbe([theta]), Meter(ClipConfig(), GuardConfig())
    for _ in range(1000):
        theta.grad = None
        x = deviations * torch.randn(sum(sizes), 4, dtype=torch.float64, generator=generator)
        meter.add(0, accumulate(list(x.split(sizes)), quadratic(theta), probe), torch.tensor(1.0))
    meter.drain()
    assert meter.metrics()["train/noise_scale"] == pytest.approx(14.25 / 6.25, rel=0.03)


def test_measuring_the_noise_leaves_the_gradient_as_it_is_to_the_bit(net):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(23, 5, dtype=torch.float64, generator=generator)
    grads = []
    for probe in (None, NoiseProbe(list(net.parameters()))):
        net.zero_grad()
        accumulate(list(x.split([10, 10, 3])), lambda i, b: Loss(net(b).square().sum(), len(b)), probe)
        grads.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_windows_of_one_micro_batch_say_nothing_of_the_noise(net):
    probe, meter = NoiseProbe(list(net.parameters())), Meter(ClipConfig(), GuardConfig())
    for sizes in ([4], [4, 0], [2, 2]):
        batches = [torch.randn(n, 5, dtype=torch.float64) for n in sizes]
        net.zero_grad()
        window = accumulate(batches, lambda i, b: Loss(net(b).square().sum(), len(b)), probe)
        assert window.noise is not None
        assert bool(torch.isfinite(window.noise[1])) == (sizes == [2, 2])
        meter.add(0, window, torch.tensor(1.0))
    assert meter.drain() == [True] * 3
    assert meter.sums["noise/trace"] == pytest.approx(float(window.noise[1]))


def test_the_guide_lists_every_field_with_its_default():
    text = (ROOT / "docs/guide/gradients.md").read_text()
    told = dict(re.findall(r"^\| `([\w.]+)` \| ([^|]+?) \|", text, re.MULTILINE))
    expected = {f"clip.{field}": value for field, value in ClipConfig()}
    expected |= {f"gradients.{field}": value for field, value in GradientConfig()}
    shown = {None: "off", True: "true", False: "false", (): "none"}
    assert told == {field: shown[v] if v in shown else str(v) for field, v in expected.items() if v != 1.0} | {
        "clip.norm": "1.0",
        "gradients.penalty_norm": "1.0",
    }
