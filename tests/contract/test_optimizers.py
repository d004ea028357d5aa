"""Every optimizer: its paper's update in float64, who decays and how fast it learns, a state that survives.

CASES binds them: one of the table that has no case here fails the first test.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rounds import rounds
from torch import nn

from trainer.checkpoint.store import CheckpointStore
from trainer.config import (
    AverageConfig,
    CheckpointConfig,
    ClipConfig,
    GuardConfig,
    OptimConfig,
    PlateauConfig,
    RollbackConfig,
    TrainConfig,
)
from trainer.config.optim import OPTIMIZERS
from trainer.errors import ConfigError
from trainer.gradients.loss_spikes import Spikes
from trainer.metrics.meter import Meter
from trainer.metrics.monitor import EarlyStopping, EarlyStoppingConfig
from trainer.model.averaging import Average
from trainer.optim import build as optim
from trainer.optim.base import Own
from trainer.optim.lookahead import Lookahead
from trainer.optim.schedule import Plateau
from trainer.optim.schedule_free import ScheduleFree
from trainer.optim.sophia import Sophia
from trainer.runtime.epochs import Epochs
from trainer.state import TrainState
from trainer.task import Loss

# --- The papers' updates, in numpy. p and g are one parameter and its gradient, t counts from 1, s is what is kept,
# c the hyperparameters, with weight_decay as it is for this parameter, and `vector`, `muon`, `curvature`, `bases`.


def moments(g, s, t, c):
    b1, b2 = c["betas"]
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
    return s["m"] / (1 - b1**t), s["v"] / (1 - b2**t)


def adamw(p, g, s, t, c):
    """Loshchilov & Hutter 2019, algorithm 2, with the schedule's multiplier in lr."""
    m, v = moments(g, s, t, c)
    return p - c["lr"] * (m / (np.sqrt(v) + c["eps"]) + c["weight_decay"] * p)


def adam(p, g, s, t, c):
    """Kingma & Ba 2015, algorithm 1; decay enters the gradient."""
    m, v = moments(g + c["weight_decay"] * p, s, t, c)
    return p - c["lr"] * m / (np.sqrt(v) + c["eps"])


def sgd(p, g, s, t, c):
    """v <- mu v + (g + wd p); p <- p - lr v, and with Nesterov p <- p - lr (g + wd p + mu v)."""
    g = g + c["weight_decay"] * p
    s["v"] = c["momentum"] * s.get("v", 0) + g
    return p - c["lr"] * (g + c["momentum"] * s["v"] if c.get("nesterov") else s["v"])


def lamb(p, g, s, t, c):
    """You et al. 2020, algorithm 2."""
    m, v = moments(g, s, t, c)
    r = m / (np.sqrt(v) + c["eps"]) + c["weight_decay"] * p
    ratio = 1.0 if c["vector"] else np.sqrt((p**2).sum()) / np.sqrt((r**2).sum())
    return p - c["lr"] * ratio * r


def lars(p, g, s, t, c):
    """You, Gitman & Ginsburg 2017, algorithm 1."""
    norm = np.sqrt((p**2).sum()), np.sqrt((g**2).sum())
    local = 1.0 if c["vector"] else c["trust_coefficient"] * norm[0] / (norm[1] + c["weight_decay"] * norm[0])
    s["v"] = c["momentum"] * s.get("v", 0) + c["lr"] * local * (g + c["weight_decay"] * p)
    return p - s["v"]


def lion(p, g, s, t, c):
    """Chen et al. 2023, program 1."""
    (b1, b2), m = c["betas"], s.get("m", np.zeros_like(g))
    s["m"] = b2 * m + (1 - b2) * g
    return p - c["lr"] * (np.sign(b1 * m + (1 - b1) * g) + c["weight_decay"] * p)


def schedule_free(p, g, s, t, c):
    """Defazio et al. 2024, algorithm 1: p is y; v has no bias and w is of the largest lr, as in schedulefree 1.4."""
    (b1, b2), (x, z) = c["betas"], s.get("points", (p, p))
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
    s["lr"] = max(s.get("lr", 0), c["lr"])
    s["sum"] = s.get("sum", 0) + s["lr"] ** 2
    z = z - c["lr"] * g / (np.sqrt(s["v"] / (1 - b2**t)) + c["eps"]) - c["lr"] * c["weight_decay"] * p
    share = s["lr"] ** 2 / s["sum"]
    x = (1 - share) * x + share * z
    s["points"] = x, z
    return (1 - b1) * z + b1 * x


def prodigy(p, g, s, t, c):
    """Mishchenko & Defazio 2024, algorithm 4, with decoupled decay, for a d that stays; see `prodigys_steps` for d."""
    (b1, b2), d = c["betas"], c["d0"]
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * d * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * d**2 * g * g
    p = p - c["lr"] * d * c["weight_decay"] * p
    return p - c["lr"] * d * s["m"] / (np.sqrt(s["v"]) + d * c["eps"])


def prodigys_steps(points, gradient, rates, c):
    """Yields d_k and the parameters of each step of algorithm 4, whose d is one for all `points`, by name."""
    (b1, b2), d, r, start = c["betas"], c["d0"], 0.0, dict(points)
    b3, zeros = math.sqrt(b2), {name: np.zeros_like(p) for name, p in points.items()}
    s, m, v = dict(zeros), dict(zeros), dict(zeros)
    for rate in rates:
        g = gradient(points)
        m = {name: b1 * m[name] + (1 - b1) * d * g[name] for name in points}
        v = {name: b2 * v[name] + (1 - b2) * d**2 * g[name] ** 2 for name in points}
        inner = sum(float((g[name] * (start[name] - points[name])).sum()) for name in points)
        r = b3 * r + (1 - b3) * rate * d**2 * inner
        s = {name: b3 * s[name] + (1 - b3) * rate * d**2 * g[name] for name in points}
        distance = c["d_coef"] * r / sum(np.abs(part).sum() for part in s.values())
        points = {name: p - rate * d * m[name] / (np.sqrt(v[name]) + d * c["eps"]) for name, p in points.items()}
        d = max(d, distance)
        yield d, points


def sophia(p, g, s, t, c):
    """Liu et al. 2024, algorithm 3."""
    b1, b2 = c["betas"]
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    if (t - 1) % c["update_every"] == 0:
        s["h"] = b2 * s.get("h", 0) + (1 - b2) * c["curvature"]
    p = p - c["lr"] * c["weight_decay"] * p
    return p - c["lr"] * np.clip(s["m"] / np.maximum(c["gamma"] * s["h"], c["eps"]), -1, 1)


def adafactor(p, g, s, t, c):
    """Shazeer & Stern 2018, algorithms 4 and 5, with the relative step's cap and the decay by lr, as torch has it."""
    rms = lambda x: np.sqrt((x**2).mean())  # noqa: E731
    b2 = 1 - t ** c["beta2_decay"]
    alpha = max(1e-3, rms(p)) * min(c["lr"], 1 / math.sqrt(t))
    if g.ndim < 2:
        s["v"] = v = b2 * s.get("v", 0) + (1 - b2) * g * g
    else:
        s["r"] = b2 * s.get("r", 0) + (1 - b2) * (g * g).mean(-1, keepdims=True)
        s["c"] = b2 * s.get("c", 0) + (1 - b2) * (g * g).mean(-2, keepdims=True)
        v = s["r"] * s["c"] / s["r"].mean(-2, keepdims=True)
    u = g / np.sqrt(v)
    p = p * (1 - c["lr"] * c["weight_decay"])
    return p - alpha * u / max(1, rms(u) / c["clip_threshold"])


def sm3(p, g, s, t, c):
    """Anil et al. 2019, SM3-II, entry by entry, with momentum on the scaled gradient and decoupled decay."""
    accumulators = s.setdefault("acc", [np.zeros(n) for n in g.shape])
    nu = np.zeros_like(g)
    for index in np.ndindex(*g.shape):
        nu[index] = min(acc[i] for acc, i in zip(accumulators, index, strict=True)) + g[index] ** 2
    s["acc"] = [np.array([np.take(nu, i, axis).max() for i in range(n)]) for axis, n in enumerate(g.shape)]
    s["m"] = c["momentum"] * s.get("m", 0) + (1 - c["momentum"]) * g / np.sqrt(nu)
    return p * (1 - c["lr"] * c["weight_decay"]) - c["lr"] * s["m"]


def radam(p, g, s, t, c):
    """Liu et al. 2020, algorithm 2, with decoupled decay."""
    m, v = moments(g, s, t, c)
    b2 = c["betas"][1]
    longest = 2 / (1 - b2) - 1
    rho = longest - 2 * t * b2**t / (1 - b2**t)
    p = p * (1 - c["lr"] * c["weight_decay"])
    if rho <= 5:
        return p - c["lr"] * m
    rect = math.sqrt((rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho))
    return p - c["lr"] * rect * m / (np.sqrt(v) + c["eps"] / math.sqrt(1 - b2**t))


def muon(p, g, s, t, c):
    """Jordan et al. 2024, scaled as Liu et al. 2025, equation 4; what is not a hidden matrix is AdamW's."""
    if not c["muon"]:
        return adamw(p, g, s, t, c)
    s["b"] = c["momentum"] * s.get("b", 0) + (1 - c["momentum"]) * g
    x = (1 - c["momentum"]) * g + c["momentum"] * s["b"]
    x = (x if x.shape[0] <= x.shape[1] else x.T) / np.sqrt((x**2).sum())
    for _ in range(c["ns_steps"]):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = x if p.shape[0] <= p.shape[1] else x.T
    return p * (1 - c["lr"] * c["weight_decay"]) - c["lr"] * 0.2 * math.sqrt(max(p.shape)) * x


def power(matrix, exponent):
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.maximum(values, 1e-6) ** exponent) @ vectors.T


def shampoo(p, g, s, t, c):
    """Gupta et al. 2018, algorithm 1, with roots as old as update_every allows; vectors as in AdaGrad."""
    if g.ndim < 2:
        s["sq"] = s.get("sq", 0) + g * g
        u = g / (np.sqrt(s["sq"]) + c["eps"])
    else:
        m = g.reshape(len(g), -1)
        s["l"] = s.get("l", c["eps"] * np.eye(m.shape[0])) + m @ m.T
        s["r"] = s.get("r", c["eps"] * np.eye(m.shape[1])) + m.T @ m
        both = m.shape[1] <= c["max_dim"]
        if t == 1 or t % c["update_every"] == 0:
            s["l_root"] = power(s["l"], -0.25 if both else -0.5)
            s["r_root"] = power(s["r"], -0.25) if both else np.eye(m.shape[1])
        u = (s["l_root"] @ m @ s["r_root"]).reshape(g.shape)
    s["u"] = c["momentum"] * s.get("u", 0) + u
    return p * (1 - c["lr"] * c["weight_decay"]) - c["lr"] * s["u"]


def soap(p, g, s, t, c):
    """Vyas et al. 2025, algorithms 3 and 4; the first bases are given, see `test_soap_starts_from_eigenbases`."""
    if g.ndim < 2:
        return adamw(p, g, s, t, c)
    m, (b1, b2) = g.reshape(len(g), -1), c["betas"]
    if t == 1:
        s |= {"l": (1 - b2) * m @ m.T, "r": (1 - b2) * m.T @ m, "ql": c["bases"][0], "qr": c["bases"][1]}
        return p
    t -= 1
    rotated = s["ql"].T @ m @ s["qr"]
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * m
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * rotated**2
    n = s["ql"].T @ (s["m"] / (1 - b1**t)) @ s["qr"] / (np.sqrt(s["v"] / (1 - b2**t)) + c["eps"])
    p = p * (1 - c["lr"] * c["weight_decay"]) - c["lr"] * (s["ql"] @ n @ s["qr"].T).reshape(p.shape)
    s["l"], s["r"] = b2 * s["l"] + (1 - b2) * m @ m.T, b2 * s["r"] + (1 - b2) * m.T @ m
    if t % c["update_every"] == 0:
        s["ql"], s["qr"] = np.linalg.qr(s["l"] @ s["ql"])[0], np.linalg.qr(s["r"] @ s["qr"])[0]
    return p


ADAM = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-8}
SGD = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9}
CASES = {
    "adamw": (ADAM, adamw),
    "adam": (ADAM, adam),
    "sgd": (SGD, sgd),
    "sgd nesterov": (SGD | {"nesterov": True}, sgd),
    "sgd plain": (SGD | {"momentum": 0.0}, sgd),
    "lamb": (ADAM, lamb),
    "lars": (SGD | {"lr": 2.0, "trust_coefficient": 0.01}, lars),
    "lion": ({"lr": 0.01, "weight_decay": 0.3, "betas": (0.8, 0.95)}, lion),
    "schedule_free": (ADAM, schedule_free),
    # A d that grows is of all parameters; the cases here are of one each, so that it stays.
    "prodigy": (ADAM | {"lr": 1.5, "d0": 0.02, "d_coef": 1e-9}, prodigy),
    "sophia": (ADAM | {"gamma": 0.05, "update_every": 3}, sophia),
    "adafactor": ({"lr": 0.02, "weight_decay": 0.1, "beta2_decay": -0.7, "clip_threshold": 1.0}, adafactor),
    "sm3": (SGD, sm3),
    "ranger": (ADAM, radam),
    "muon": (ADAM | {"momentum": 0.9, "ns_steps": 4}, muon),
    "shampoo": (SGD | {"eps": 1e-6, "update_every": 3}, shampoo),
    "shampoo one-sided": (SGD | {"eps": 1e-6, "update_every": 3, "max_dim": 9}, shampoo),
    "soap": (ADAM | {"update_every": 3}, soap),
}


@pytest.fixture(params=CASES)
def case(request):
    return request.param


def config_of(case: str, **changes) -> OptimConfig:
    return OptimConfig(name=case.partition(" ")[0], **CASES[case][0] | changes)


def model() -> nn.Module:
    """A matrix, a kernel of three dimensions, vectors, in float64. No two sides are equal, so none can be mixed up."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Conv1d(5, 4, 2)).double()


def gradients(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def step(optimizer: torch.optim.Optimizer, net: nn.Module, t: int) -> None:
    """Step number t, from 1, on gradients and, where it looks at that, curvature that are functions of t."""
    gradients(net, t)
    if isinstance(optimizer, Sophia):
        due = optimizer.due(t - 1)
        optimizer.curvature = {p: p.grad.flip(0).abs() for p in net.parameters()} if due else {}
    optimizer.step()


def equal(net: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))


def test_each_of_the_table_is_bound():
    unbound = set(OPTIMIZERS) ^ {case.partition(" ")[0] for case in CASES}
    assert not unbound, (
        f"CASES in {Path(__file__).name} and OPTIMIZERS differ in {sorted(unbound)}: add a case to CASES"
    )


def test_equals_the_papers_update_in_float64(case):
    fields, update = CASES[case]
    config, net = config_of(case), model()
    optimizer = optim.build(config, net)
    expected = {name: p.detach().numpy().copy() for name, p in net.named_parameters()}
    states = {name: {} for name in expected}
    for t in range(1, 13):
        step(optimizer, net, t)
        for name, p in net.named_parameters():
            vector, g = p.ndim < 2, p.grad.numpy()
            c = config.hyperparameters | {"vector": vector, "muon": p.ndim == 2, "curvature": np.abs(g[::-1])}
            c |= {"weight_decay": 0.0 if vector else fields["weight_decay"]}
            c |= {"bases": [optimizer.state[p].get(f"{side}_basis") for side in ("left", "right")]}
            c["bases"] = [None if b is None else b.numpy().copy() for b in c["bases"]]
            expected[name] = update(expected[name], g, states[name], t, c)
    for name, p in net.named_parameters():
        moved = np.abs(expected[name] - dict(model().named_parameters())[name].detach().numpy()).max()
        assert moved > 1e-5, f"{name} has hardly moved: the comparison shows nothing"
        np.testing.assert_allclose(p.detach().numpy(), expected[name], rtol=1e-9, atol=1e-9 * moved)


def test_decreases_a_quadratic(case):
    """f(x) = (x - x*)' A (x - x*) / 2 on a matrix and a vector, A with condition 100: down to a tenth."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 7))
    targets = [torch.randn_like(p) for p in net.parameters()]
    scales = [torch.logspace(-1, 1, p.numel()).view_as(p) for p in net.parameters()]

    def loss() -> torch.Tensor:
        return sum((a * (p - x) ** 2).sum() / 2 for a, p, x in zip(scales, net.parameters(), targets, strict=True))

    growing = {"lr": 1.0, "d0": 1e-6, "d_coef": 1.0}
    changes = {"lars": {"lr": 0.05, "trust_coefficient": 0.5}, "muon": {"lr": 0.05}, "prodigy": growing}.get(case, {})
    optimizer = optim.build(config_of(case, **{"weight_decay": 0.0} | changes), net)
    first = loss().item()
    for t in range(400):
        optimizer.zero_grad()
        loss().backward()
        if isinstance(optimizer, Sophia) and optimizer.due(t):
            optimizer.observe([Loss(loss(), 1)], 1, seed=t)
        optimizer.step()
    assert loss().item() < first / 10


def test_defaults_are_the_tables():
    for name, known in OPTIMIZERS.items():
        config = OptimConfig(name=name)
        optimizer = optim.build(config, model())
        assert optim.learning_rate(config) == known.defaults["lr"]
        for group in optimizer.param_groups:
            decay = 0.0 if group["vector"] else known.defaults["weight_decay"]
            renamed = {"clip_threshold": "d"}
            expected = {renamed.get(field, field): value for field, value in known.defaults.items()}
            if name == "muon":
                dropped = ("betas", "eps") if group["muon"] else ("momentum", "nesterov", "ns_steps")
                expected = {field: value for field, value in expected.items() if field not in (*dropped, "adamw")}
            assert {field: group[field] for field in expected} == expected | {"weight_decay": decay}


# --- Groups


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


def by_name(net: nn.Module, groups: list[dict], field: str) -> dict[str, float]:
    names = {p: name for name, p in net.named_parameters()}
    return {names[p]: group[field] for group in groups for p in group["params"]}


def test_norms_biases_and_vectors_do_not_decay():
    net = Everything()
    decay, rest = optim.param_groups(net, OptimConfig(weight_decay=0.1))
    assert by_name(net, [decay], "weight_decay") == dict.fromkeys(
        ("embed.weight", "linear.weight", "conv.weight", "gru.weight_ih_l0", "gru.weight_hh_l0"), 0.1
    )
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert len(rest["params"]) == len([p for p in net.parameters() if p.requires_grad]) - len(decay["params"])


@rounds("case", CASES)
def test_decay_moves_only_what_decays(case):
    """With gradients that are the same and another weight_decay, vectors end bit-equal and matrices do not."""
    nets = [model(), model()]
    for net, weight_decay in zip(nets, (0.0, 0.2), strict=True):
        optimizer = optim.build(config_of(case, weight_decay=weight_decay), net)
        for t in range(1, 4):
            step(optimizer, net, t)
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(p, q) == (p.ndim < 2)


@rounds("case", CASES)
def test_a_groups_learning_rate_is_its_own(case):
    """A parameter at lr_scale 1/2 moves as in a run at half the learning rate, its neighbours as at the whole."""

    def trained(lr: float, **changes) -> nn.Module:
        net = model()
        optimizer = optim.build(config_of(case, **changes), net)
        for t in range(1, 4):
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            step(optimizer, net, t)
        return net

    lr = CASES[case][0]["lr"]
    whole, half = trained(lr), trained(lr / 2)
    mixed = trained(lr, groups=[{"pattern": "2.*", "lr_scale": 0.5}])
    assert not equal(whole, half)
    for name, p in mixed.named_parameters():
        torch.testing.assert_close(p, dict((half if name[0] == "2" else whole).named_parameters())[name])


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.zeros(4))
        self.embed = nn.Embedding(5, 4)
        self.encoder = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))})
        self.head = nn.Linear(4, 5)


def test_layer_decay_counts_blocks_from_the_last():
    net = Blocks()
    scales = by_name(net, optim.param_groups(net, OptimConfig(layer_decay=0.5)), "lr_scale")
    assert scales == {
        "cls": 1 / 16,
        "embed.weight": 1 / 8,
        "encoder.blocks.0.weight": 1 / 4,
        "encoder.blocks.0.bias": 1 / 4,
        "encoder.blocks.1.weight": 1 / 2,
        "encoder.blocks.1.bias": 1 / 2,
        "head.weight": 1,
        "head.bias": 1,
    }


def test_patterns_set_scale_and_decay_and_the_first_that_matches_wins():
    net = Blocks()
    groups = [{"pattern": "head.*", "lr_scale": 10, "weight_decay": 0.3}, {"pattern": "*weight", "lr_scale": 2}]
    made = optim.param_groups(net, OptimConfig(layer_decay=0.5, weight_decay=0.1, groups=groups))
    scales, decays = by_name(net, made, "lr_scale"), by_name(net, made, "weight_decay")
    assert (scales["head.weight"], scales["head.bias"], scales["embed.weight"], scales["cls"]) == (
        10,
        10,
        1 / 4,
        1 / 16,
    )
    assert (decays["head.weight"], decays["head.bias"], decays["embed.weight"], decays["cls"]) == (0.3, 0.3, 0.1, 0.0)
    with pytest.raises(
        ConfigError, match=r"no parameter is left for pattern 'haed\.\*'.*embed\.weight.*: give a pattern"
    ):
        optim.param_groups(net, OptimConfig(groups=[{"pattern": "haed.*"}]))


# --- What is refused


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ConfigError, match="has no parameter"):
        optim.build(OptimConfig(), nn.Sequential(nn.ReLU()))


def test_muon_takes_attention_of_many_heads_and_no_heads_of_a_model():
    heads = lambda: {"head": nn.Linear(4, 4), "lm_head": nn.Linear(4, 4), "heads": nn.Sequential(nn.Linear(4, 4))}  # noqa: E731
    net = nn.ModuleDict({"layer": nn.TransformerDecoderLayer(4, 2, 8), "inner": nn.ModuleDict(heads()), **heads()})
    muon = by_name(net, optim.param_groups(net, OptimConfig(name="muon")), "muon")
    attention = [f"{kind}.{name}" for kind in ("self_attn", "multihead_attn") for name in ("in_proj_", "out_proj.")]
    expected = {f"layer.{name}weight" for name in (*attention, "linear1.", "linear2.")}
    assert {name for name, mine in muon.items() if mine} == expected


def test_muon_takes_hidden_matrices_and_refuses_a_model_without():
    net = Blocks()
    muon = by_name(net, optim.param_groups(net, OptimConfig(name="muon")), "muon")
    assert [name for name, mine in muon.items() if mine] == ["encoder.blocks.0.weight", "encoder.blocks.1.weight"]
    only_first = OptimConfig(name="muon", adamw=["*.1.*", "head*"])
    assert [n for n, mine in by_name(net, optim.param_groups(net, only_first), "muon").items() if mine] == [
        "encoder.blocks.0.weight"
    ]
    for net in (nn.Sequential(nn.Conv1d(2, 2, 2)), nn.Sequential(nn.Embedding(3, 3), nn.LayerNorm(3))):
        with pytest.raises(ConfigError, match=r"'muon'.*Sequential has no hidden matrix.*choose adamw"):
            optim.build(OptimConfig(name="muon"), net)


@rounds("name", OPTIMIZERS)
@rounds("parallel", [{"data": 2, "shard": "zero3"}, {"tensor": 2}])
def test_what_needs_whole_parameters_is_refused_where_they_are_sharded(name, parallel):
    given = {"optim": {"name": name}, "parallel": parallel}
    if OPTIMIZERS[name].sharded:
        assert TrainConfig.model_validate(given).optim.name == name
    else:
        with pytest.raises(ValidationError, match=f"'{name}'.*parts of them: choose one of sgd, adam, adamw, lamb"):
            TrainConfig.model_validate(given)


@rounds(
    ("optim", "parallel", "said"),
    [
        ({"name": "sgd", "implementation": "fused"}, {"tensor": 2}, "'fused', which sgd has for whole parameters"),
        ({"name": "sophia"}, {"data": 2, "shard": "zero1"}, "leave parallel.shard out"),
        ({"name": "sophia"}, {"pipeline": 2}, "leave parallel.pipeline out"),
        ({"name": "schedule_free"}, {"data": 2, "shard": "zero1"}, "an average of all parameters.*parallel.shard out"),
        ({"name": "schedule_free"}, {"pipeline": 2}, "leave parallel.pipeline out"),
        ({"name": "prodigy"}, {"data": 2, "shard": "zero1"}, "one distance from all parameters.*parallel.shard out"),
        ({"name": "prodigy"}, {"pipeline": 2}, "leave parallel.pipeline out"),
    ],
)
def test_what_ranks_cannot_step_is_refused_before_they_start(optim, parallel, said):
    with pytest.raises(ValidationError, match=said):
        TrainConfig.model_validate({"optim": optim, "parallel": parallel, "micro_batch_size": 1})


# --- State


@rounds("skipped_step", [1, 3])
@pytest.mark.parametrize("case", [case for case in CASES if "fused" in OPTIMIZERS[case.partition(" ")[0]].runs_as])
def test_a_step_skipped_by_the_device_leaves_no_trace(case, skipped_step):
    """The flag that a GPU's guard sets: as if the step had not been, also where it is the very first."""
    net, other = model(), model()
    optimizer, undisturbed = optim.build(config_of(case), net), optim.build(config_of(case), other)
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
    assert equal(net, other)


def larger() -> nn.Module:
    """In float32, and large enough for matrix kernels to depend on the layout of what they are given."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 65), nn.LayerNorm(65), nn.Conv1d(65, 17, 3))


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> TrainState:
    return TrainState(
        model=net,
        optimizer=optimizer,
        plateau=Plateau(PlateauConfig(), 0.1),
        early_stopping=EarlyStopping(EarlyStoppingConfig()),
        meter=Meter(ClipConfig(), GuardConfig()),
        average=Average(AverageConfig(), net, total=8),
        spikes=Spikes(RollbackConfig()),
        epochs=Epochs(4),
        micro_batch_size=1,
    )


def test_its_state_survives_the_checkpoint_store(case, tmp_path):
    """Saved as safetensors at every step, read into a new model and optimizer: bit-equal to all steps in one."""
    net = larger()
    optimizer = optim.build(config_of(case), net)
    store = CheckpointStore(tmp_path, fence=1)
    for t in range(1, 9):
        store.commit(store.save(state_of(net, optimizer).state_dict(), step=t - 1, epoch=0), CheckpointConfig())
        step(optimizer, net, t)
        resumed = larger()
        second = optim.build(config_of(case), resumed)
        loaded = store.load_latest()
        assert loaded is not None
        state_of(resumed, second).load_state_dict(loaded[0])
        for later in (t, t + 1):
            step(second, resumed, later)
        ahead, ahead_optimizer = copy.deepcopy((net, optimizer))
        step(ahead_optimizer, ahead, t + 1)
        assert equal(ahead, resumed), t


@rounds("case", CASES)
def test_another_optimizers_state_is_refused(case):
    net = model()
    other = optim.build(OptimConfig(name="lion" if case != "lion" else "adamw"), net)
    state = state_of(net, optim.build(config_of(case), net)).state_dict()
    with pytest.raises(ConfigError, match=r"checkpoint holds the state of \w+, and train\.optim asks for (Lion|AdamW)"):
        state_of(net, other).load_state_dict(state)


@rounds("name", OPTIMIZERS)
def test_its_implementations_agree(name):
    """Our own to the bit; torch's to rounding."""
    case = name
    results = []
    for way in OPTIMIZERS[name].runs_as:
        net = model()
        optimizer = optim.build(config_of(case, implementation=way), net)
        for t in range(1, 6):
            step(optimizer, net, t)
        results.append(net)
    for other in results[1:]:
        if isinstance(optimizer, Own):
            assert equal(results[0], other)
        for p, q in zip(results[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


# --- Their own


def test_muon_steps_as_torchs_does():
    """Which orthogonalises in bf16."""
    nets = [nn.Linear(5, 3, bias=False) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    ours = optim.build(OptimConfig(name="muon"), nets[0])
    theirs = torch.optim.Muon(nets[1].parameters(), adjust_lr_fn="match_rms_adamw", momentum=0.95)
    before = nets[0].weight.detach().clone()
    for t in range(1, 6):
        for net, optimizer in zip(nets, (ours, theirs), strict=True):
            gradients(net, t)
            optimizer.step()
    assert (nets[0].weight - nets[1].weight).norm() < 0.03 * (nets[0].weight - before).norm()


def test_soap_starts_from_eigenbases():
    net = model()
    optimizer = optim.build(config_of("soap"), net)
    step(optimizer, net, 1)
    assert equal(net, nn.Sequential(*model()).double()) is False  # vectors have moved
    assert torch.equal(net[0].weight, model()[0].weight)
    for p in (net[0].weight, net[2].weight):
        g = p.grad.reshape(len(p), -1)
        for side, gram in (("left", g @ g.T), ("right", g.T @ g)):
            basis = optimizer.state[p][f"{side}_basis"]
            torch.testing.assert_close(basis.T @ basis, torch.eye(len(gram), dtype=p.dtype))
            diagonal = basis.T @ gram @ basis
            torch.testing.assert_close(diagonal, torch.diag(diagonal.diag()), atol=1e-9, rtol=0)


def test_schedule_free_weighs_steps_by_the_squares_of_their_rates():
    """Its x equals algorithm 1's through a warmup, a fall and a step without a gradient."""
    net, config = model(), config_of("schedule_free")
    optimizer = optim.build(config, net)
    assert isinstance(optimizer, ScheduleFree)
    assert not optimizer.averaged()
    y = {name: p.detach().numpy().copy() for name, p in net.named_parameters()}
    states, steps = {name: {} for name in y}, dict.fromkeys(y, 0)
    for t, lr in enumerate((0.01, 0.02, 0.04, 0.04, 0.01, 0.002), start=1):
        gradients(net, t)
        net[1].weight.grad = None if t == 3 else net[1].weight.grad
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        for name, p in net.named_parameters():
            if p.grad is not None:
                steps[name] += 1
                c = config.hyperparameters | {"lr": lr, "weight_decay": 0.1 if p.ndim > 1 else 0.0}
                y[name] = schedule_free(y[name], p.grad.numpy(), states[name], steps[name], c)
    points = optimizer.averaged()
    for name, p in net.named_parameters():
        x, _ = states[name]["points"]
        np.testing.assert_allclose(points[p].numpy(), x, rtol=1e-9)
        np.testing.assert_allclose(p.detach().numpy(), y[name], rtol=1e-9)
        assert np.abs(x - y[name]).max() > 1e-4


@rounds("foreach", [True, False])
def test_prodigy_estimates_one_distance_for_all_parameters(foreach):
    """On f(x) = |A (x - x*)|_1 smoothed, by rates that rise and fall; d grows up to the true distance."""
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4)).double()
    targets = {name: np.random.default_rng(len(name)).normal(size=p.shape) for name, p in net.named_parameters()}
    config = OptimConfig(name="prodigy", d0=1e-5, d_coef=0.7, implementation="foreach" if foreach else "single")
    optimizer = optim.build(config, net)
    rates = [min(1.0, (t + 1) / 5) * (1 - t / 100) for t in range(60)]

    def gradient(points):
        return {name: np.tanh(3 * (p - targets[name])) for name, p in points.items()}

    start, grown, d = {name: p.detach().numpy().copy() for name, p in net.named_parameters()}, 0, 0.0
    for rate, (d, points) in zip(rates, prodigys_steps(start, gradient, rates, config.hyperparameters), strict=True):
        before = optimizer.param_groups[0]["d"]
        for group in optimizer.param_groups:
            group["lr"] = rate
        slopes = gradient({name: p.detach().numpy() for name, p in net.named_parameters()})
        for name, p in net.named_parameters():
            p.grad = torch.from_numpy(slopes[name])
        optimizer.step()
        for group in optimizer.param_groups:
            assert group["d"] == pytest.approx(d, rel=1e-9)
        grown += optimizer.param_groups[0]["d"] > before
        for name, p in net.named_parameters():
            np.testing.assert_allclose(p.detach().numpy(), points[name], rtol=1e-7)
    distance = max(np.abs(targets[name] - p).max() for name, p in start.items())
    assert grown > 5
    assert 1e-2 * distance < d <= distance


def test_prodigys_distance_survives_the_checkpoint_store(tmp_path):
    nets, optimizers = [], []
    for _ in range(2):
        nets.append(larger())
        optimizers.append(optim.build(OptimConfig(name="prodigy", d0=1e-3), nets[-1]))
    states = [state_of(net, optimizer) for net, optimizer in zip(nets, optimizers, strict=True)]
    store = CheckpointStore(tmp_path, fence=1)

    def slide(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    for _ in range(5):
        slide(nets[0], optimizers[0])
    assert optimizers[0].param_groups[0]["d"] > 1e-3
    store.commit(store.save(states[0].state_dict(), step=5, epoch=0), CheckpointConfig())
    loaded = store.load_latest()
    assert loaded is not None
    states[1].load_state_dict(loaded[0])
    for _ in range(3):
        for net, optimizer in zip(nets, optimizers, strict=True):
            slide(net, optimizer)
    assert equal(*nets)
    assert optimizers[0].param_groups[-1]["d"] == optimizers[1].param_groups[-1]["d"]


def test_schedule_free_refuses_a_second_average():
    for fields, sentence in (
        ({"wrap": "lookahead"}, "wrap is 'lookahead', which moves the weights, and schedule_free computes"),
        ({"beta1": 0.0}, "the first of betas is 0.*set it above 0"),
    ):
        with pytest.raises(ValidationError, match=sentence):
            OptimConfig(name="schedule_free", **fields)
    with pytest.raises(
        ValidationError, match=r"average.name is 'ema', and optim.name=schedule_free averages.*leave av"
    ):
        TrainConfig(optim=OptimConfig(name="schedule_free"), average=AverageConfig(name="ema"))


def test_sophia_estimates_the_hessians_diagonal():
    """u (H u) with the H that torch.func gives, summed over micro-batches; its mean over many u is the diagonal."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x, y = torch.randn(8, 2, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)
    params = dict(net.named_parameters())

    def total(flat: torch.Tensor) -> torch.Tensor:
        pieces = flat.split([p.numel() for p in params.values()])
        shaped = {n: piece.view_as(p) for (n, p), piece in zip(params.items(), pieces, strict=True)}
        return ((torch.func.functional_call(net, shaped, x) - y) ** 2).mean()

    hessian = torch.autograd.functional.hessian(total, torch.cat([p.detach().flatten() for p in params.values()]))
    optimizer = optim.build(OptimConfig(name="sophia"), net)
    in_order = [p for group in optimizer.param_groups for p in group["params"]]
    mean = 0.0
    for seed in range(300):
        losses = (Loss(((net(x[rows]) - y[rows]) ** 2).sum(), 4) for rows in (slice(0, 3), slice(3, 8)))
        optimizer.observe(losses, 8, seed)
        found = torch.cat([optimizer.curvature[p].flatten() for p in params.values()])
        if seed == 0:
            generator = torch.Generator().manual_seed(seed)
            draws = {p: torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in in_order}
            u = torch.cat([draws[p].flatten() for p in params.values()])
            torch.testing.assert_close(found, u * (hessian @ u))
        mean = mean + found / 300
    assert (mean - hessian.diag()).norm() < 0.3 * hessian.diag().norm()
    assert all(p.grad is None for p in net.parameters())


def test_sophia_differentiates_attention_twice_and_says_what_it_cannot():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 12)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v)

    net = Attention()
    optimizer = optim.build(OptimConfig(name="sophia"), net)
    assert optimizer.observe((Loss(net(x).square().sum(), 5) for x in [torch.randn(1, 1, 5, 4)]), 5, seed=0) > 0

    def ctc() -> Loss:
        log_probabilities = net.qkv(torch.randn(5, 2, 4)).log_softmax(-1)
        return Loss(nn.functional.ctc_loss(log_probabilities, torch.ones(2, 2, dtype=torch.long), [5, 5], [2, 2]), 1)

    with pytest.raises(ConfigError, match=r"optim.name=sophia needs second.*choose adamw or lion"):
        optimizer.observe([ctc()], 1, seed=0)


def test_lookahead_equals_the_papers_loop():
    """Zhang et al. 2019, algorithm 1, around arbitrary inner steps; and from a checkpoint within a cycle."""
    torch.manual_seed(0)
    fast = {"w": nn.Parameter(torch.randn(3, 2, dtype=torch.float64))}
    lookahead = Lookahead(fast, k=3, alpha=0.4)
    slow = inner = fast["w"].detach().numpy().copy()
    for t in range(1, 12):
        move = np.random.default_rng(t).normal(size=(3, 2))
        with torch.no_grad():
            fast["w"] += torch.from_numpy(move)
        inner = inner + move
        lookahead.step()
        if t % 3 == 0:
            slow = inner = slow + 0.4 * (inner - slow)
        np.testing.assert_allclose(fast["w"].detach().numpy(), inner, rtol=1e-12)
        state = copy.deepcopy(lookahead.state())
        lookahead = Lookahead(fast, k=3, alpha=0.4)
        lookahead.load(state)
    lookahead.load(None)
    assert (lookahead.steps, torch.equal(lookahead.slow["w"], fast["w"])) == (0, True)
