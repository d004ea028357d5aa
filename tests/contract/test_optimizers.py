"""Every optimizer: its paper's update in float64, who decays, and a state that survives; skipping leaves no trace."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from trainer import optim
from trainer.config import ClipConfig, GuardConfig, OptimConfig, PlateauConfig
from trainer.errors import ConfigError
from trainer.meter import Meter
from trainer.monitor import EarlyStopping, EarlyStoppingConfig
from trainer.schedule import Plateau
from trainer.state import TrainState


def adamw(p, g, state, t, c):
    """Loshchilov & Hutter 2019, algorithm 2, with the schedule's multiplier in lr."""
    lr, wd, (b1, b2) = c["lr"], c["weight_decay"], c["betas"]
    state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0) + (1 - b2) * g * g
    m, v = state["m"] / (1 - b1**t), state["v"] / (1 - b2**t)
    return p - lr * (m / (np.sqrt(v) + c["eps"]) + wd * p)


def sgd(p, g, state, t, c):
    """v <- mu v + (g + wd p); p <- p - lr v, and with Nesterov p <- p - lr (g + wd p + mu v)."""
    g = g + c["weight_decay"] * p
    state["v"] = c["momentum"] * state.get("v", 0) + g
    return p - c["lr"] * (g + c["momentum"] * state["v"] if c.get("nesterov") else state["v"])


ADAMW = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-8}
SGD = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9}
CASES = {
    "adamw": ("adamw", ADAMW, adamw),
    "sgd": ("sgd", SGD, sgd),
    "sgd nesterov": ("sgd", SGD | {"nesterov": True}, sgd),
    "sgd plain": ("sgd", SGD | {"momentum": 0.0}, sgd),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


class Everything(nn.Module):
    """Every kind of parameter there is a rule for; two names share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.gru = nn.GRU(4, 4)
        self.batch_norm, self.layer_norm, self.rms = nn.BatchNorm1d(4), nn.LayerNorm((2, 4)), nn.RMSNorm((2, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).double()


def gradients(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def build(case, net: nn.Module) -> torch.optim.Optimizer:
    name, fields, _ = case
    return optim.build(OptimConfig(name=name, **fields), net)


def test_equals_the_papers_update_in_float64(case):
    _, fields, update = case
    net = model()
    optimizer = build(case, net)
    expected = {name: p.detach().numpy().copy() for name, p in net.named_parameters()}
    states = {name: {} for name in expected}
    for t in range(1, 8):
        gradients(net, t)
        for name, p in net.named_parameters():
            decay = fields["weight_decay"] if name == "0.weight" else 0.0
            c = fields | {"weight_decay": decay}
            expected[name] = update(expected[name], p.grad.numpy(), states[name], t, c)
        optimizer.step()
    for name, p in net.named_parameters():
        np.testing.assert_allclose(p.detach().numpy(), expected[name], rtol=1e-12, atol=1e-14)


def test_norms_biases_and_vectors_do_not_decay():
    net = Everything()
    names = {p: name for name, p in net.named_parameters()}
    decay, rest = optim.param_groups(net, 0.1)
    assert {names[p] for p in decay["params"]} == {
        "embed.weight",
        "linear.weight",
        "conv.weight",
        "gru.weight_ih_l0",
        "gru.weight_hh_l0",
    }
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert len(rest["params"]) == len([p for p in net.parameters() if p.requires_grad]) - len(decay["params"])


def test_defaults_are_the_optimizers_own():
    for name in ("adamw", "sgd"):
        [group, *_] = optim.build(OptimConfig(name=name), model()).param_groups
        assert {field: group[field] for field in optim.DEFAULTS[name]} == optim.DEFAULTS[name]


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ConfigError, match="has no parameter"):
        optim.build(OptimConfig(), nn.Sequential(nn.ReLU()))


@pytest.mark.parametrize("skipped_step", [1, 3])
def test_a_step_skipped_by_the_device_leaves_no_trace(case, skipped_step):
    """The flag that a GPU's guard sets: as if the step had not been, also where it is the very first."""
    net, other = model(), model()
    optimizer, undisturbed = build(case, net), build(case, other)
    assert optimizer._step_supports_amp_scaling
    for t in range(1, 5):
        if t == skipped_step:
            for p in net.parameters():
                p.grad = torch.full_like(p, float("nan"))
            optimizer.found_inf = torch.tensor(1.0)
            optimizer.step()
        for one, o in ((net, optimizer), (other, undisturbed)):
            gradients(one, t)
            o.found_inf = torch.tensor(0.0)
            o.step()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_its_state_survives(case):
    """Half the steps, its state into a new optimizer and model, the other half: bit-equal to all steps in one."""

    def state(net, optimizer):
        watch = EarlyStopping(EarlyStoppingConfig())
        return TrainState(
            net, optimizer, Plateau(PlateauConfig(), 0.1), watch, Meter(ClipConfig(), GuardConfig()), windows=4
        )  # fmt: skip

    net = model()
    optimizer = build(case, net)
    for t in range(6):
        if t == 3:
            half = copy.deepcopy(state(net, optimizer).state_dict())
        gradients(net, t)
        optimizer.step()
    resumed = model()
    second = build(case, resumed)
    state(resumed, second).load_state_dict(half)
    for t in range(3, 6):
        gradients(resumed, t)
        second.step()
    for p, q in zip(net.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
