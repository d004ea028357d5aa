"""Trainings by each optimizer and schedule of the trainer, without the trainer's loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from golden_task import filled, numbers
from torch import Tensor, nn

from trainer.config import OptimConfig, ScheduleConfig
from trainer.config.optim import OPTIMIZERS
from trainer.config.schedule import OWN_FIELDS
from trainer.optim.build import build, learning_rate
from trainer.optim.lookahead import lookahead
from trainer.optim.schedule import Plateau, scaled_lr, schedule
from trainer.runtime.epochs import Epochs
from trainer.task import Loss

# --- Optimizers

STEPS = 21  # twice an `update_every` of 10, and one more
# Values of the fields that optimizers have of their own, none of them a default.
HYPERPARAMETERS: dict[str, Any] = {
    "lr": 0.02,
    "weight_decay": 0.05,
    "momentum": 0.6,
    "betas": (0.8, 0.9),
    "eps": 1e-4,
    "trust_coefficient": 0.02,
    "d0": 1e-3,
    "d_coef": 0.5,
    "gamma": 0.5,
    "update_every": 3,
    "max_dim": 5,
    "beta2_decay": -0.5,
    "clip_threshold": 2.0,
    "ns_steps": 3,
    "adamw": ("*embed*", "head*", "inner.0*"),
}
GROUPS = ({"pattern": "norm*", "lr_scale": 0.5, "weight_decay": 0.01}, {"pattern": "head.bias", "lr_scale": 2.0})


class Parts(nn.Module):
    """A parameter of each kind that optimizers tell apart; `complex` adds one with an imaginary part."""

    def __init__(self, *, complex: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        self.cube, self.scale = nn.Parameter(torch.zeros(3, 2, 2)), nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(3, 3)
        if complex:
            self.turn = nn.Parameter(torch.zeros(4, 3, dtype=torch.complex64))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.inner[1](self.inner[0](self.norm(self.embed(ids))).tanh()).tanh()
        return self.head(x @ self.cube.flatten(1).T * self.scale)


def optimizer(name: str) -> Any:
    """Returns the weights after each step of trainings by an optimizer of the table, under several settings."""
    return dict(_trainings(name))


def _trainings(name: str) -> Iterator[tuple[str, Any]]:
    known = OPTIMIZERS[name]
    defaults = known.defaults
    fields = {name: not value if isinstance(value, bool) else HYPERPARAMETERS[name] for name, value in defaults.items()}
    yield "defaults", _trained(OptimConfig(name=name))
    yield "fields", _trained(OptimConfig.model_validate({"name": name, **fields}))
    grouped = {"name": name, "lr": 0.05, "layer_decay": 0.8, "groups": GROUPS}
    yield "groups", _trained(OptimConfig.model_validate(grouped))
    for implementation in known.runs_as if len(known.runs_as) > 1 else ():
        yield implementation, _trained(OptimConfig(name=name, implementation=implementation))
    if known.takes_complex:
        yield "complex", _trained(OptimConfig(name=name), complex=True)


def _trained(config: OptimConfig, *, complex: bool = False) -> list[dict[str, Tensor]]:
    """Returns the weights after each step of a learning rate that falls, by gradients that are fixed numbers."""
    model = filled(Parts(complex=complex))
    optimizer, slow = build(config, model), lookahead(config, model)
    weights: list[dict[str, Tensor]] = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config) * (1 - step / 50) * group["lr_scale"]
        _look_at_curvature(optimizer, model, step)
        for place, p in enumerate(model.parameters()):
            p.grad = numbers(*p.shape, seed=100 * step + place, dtype=p.dtype)
        if step == 4:
            model.embed.weight.grad = None
        optimizer.step()
        if slow is not None:
            slow.step()
        weights.append({key: value.clone() for key, value in model.state_dict().items()})
    return weights


def _look_at_curvature(optimizer: Any, model: nn.Module, step: int) -> None:
    """Has an optimizer that looks at the curvature of a window do so, where this one is due."""
    if not hasattr(optimizer, "observe"):
        return
    optimizer.forget()
    if optimizer.due(step):
        ids = torch.tensor([0, 3, 1, 4, 3])
        losses = (Loss((model(ids) - target).square().sum(), 5) for target in (0, 1))
        optimizer.observe(losses, 10, seed=step)


# --- Schedules

LR, TOTAL = 0.3, 40
EPOCHS = {"even": Epochs(5), "growing": Epochs(8, ((2, 4),))}
# Values of the fields that schedules have of their own; of those with a choice each in turn.
FIELDS: dict[str, tuple[Any, ...]] = {
    "min_lr": (0.05,),
    "num_cycles": (2,),
    "cycle_mult": (1.5,),
    "power": (0.9,),
    "gamma": (0.7,),
    "step_size": (1.5,),
    "milestones": ((1.0, 2.5),),
    "timescale": (5.0,),
    "decay_ratio": (0.4,),
    "decay_shape": ("sqrt", "linear", "cosine"),
    "cycle_mode": ("triangular", "triangular2", "exp_range"),
    "one_cycle": ({"pct_start": 0.4, "div_factor": 10.0, "final_div_factor": 100.0},),
    "plateau": ({"patience": 1, "factor": 0.3, "threshold": 0.01, "min_lr": 0.01}, {"mode": "max", "patience": 0}),
}
WARMUPS: tuple[dict[str, Any], ...] = (
    {"warmup_steps": 7},
    {"warmup_ratio": 0.2},
    {"warmup_epochs": 1.5},
    {"warmup_steps": 60},
    {"warmup": "cosine", "warmup_steps": 7},
    {"warmup": "polynomial", "warmup_steps": 7},
    {"warmup": "polynomial", "warmup_steps": 7, "warmup_power": 3.0},
    {"warmup": "exponential", "warmup_steps": 7},
    {"warmup": "exponential", "warmup_steps": 7, "warmup_start": 0.1},
)
MONITORED = (1.0, 0.9, 0.95, 0.93, 0.8995, 0.95, math.nan, -0.5, -0.4, -0.6)  # of a plateau's epochs


def scheduled(name: str) -> Any:
    """Returns the learning rates of a schedule at every step, under several settings, and the weights of a training by
    them."""
    return [_rates(config) for config in _configs(name)]


def _configs(name: str) -> Iterator[ScheduleConfig]:
    yield ScheduleConfig.model_validate({"name": name})
    fields = {field: FIELDS[field] for field in OWN_FIELDS[name]}
    for turn in range(max((len(values) for values in fields.values()), default=0)):
        chosen = {field: values[turn % len(values)] for field, values in fields.items()}
        if name == "cyclical" and chosen["cycle_mode"] != "exp_range":
            del chosen["gamma"]
        yield ScheduleConfig.model_validate({"name": name, **chosen, "warmup_steps": 4})
    for warmup in WARMUPS:
        if name != "one_cycle" or "warmup" not in warmup:
            yield ScheduleConfig.model_validate({"name": name, **warmup})
    for scale_lr in ("linear", "sqrt"):
        yield ScheduleConfig.model_validate({"name": name, "scale_lr": scale_lr, "base_batch_size": 48})


def _rates(config: ScheduleConfig) -> dict[str, Any]:
    peak = scaled_lr(config, LR, batch_size=32)
    rate = {title: schedule(config, peak, TOTAL, lengths) for title, lengths in EPOCHS.items()}
    plateau, scales = Plateau(config.plateau, peak), [1.0]
    if config.name == "plateau":
        for value in MONITORED:
            plateau.update(value)
            scales.append(plateau.scale)
    return {
        "rates": {title: [at(step) for step in range(TOTAL + 1)] for title, at in rate.items()},
        "scales": scales,
        "weights": _stepped([rate["even"](4 * step) * scales[step % len(scales)] for step in range(10)]),
    }


def _stepped(rates: list[float]) -> Tensor:
    """Returns weights after steps of torch's SGD at these rates."""
    p = nn.Parameter(numbers(3, 4))
    optimizer = torch.optim.SGD([p], momentum=0.5)
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        p.grad = numbers(3, 4, seed=step + 1)
        optimizer.step()
    return p


OPTIMIZATION: dict[str, Callable[[], Any]] = {
    **{f"optimizer {name}": partial(optimizer, name) for name in OPTIMIZERS},
    **{f"schedule {name}": partial(scheduled, name) for name in OWN_FIELDS},
}
