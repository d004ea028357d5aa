"""Trials as lanes of one model: each is the trial that it is on its own, whoever trains beside it and wherever it was
cut, and `fit`'s but for rounding."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lane_runs import (
    CUTS,
    EPOCH,
    LRS,
    SAMPLES,
    Cut,
    OneOf,
    Small,
    Whole,
    alone,
    assert_close,
    each,
    leaves,
    solo,
    together,
)
from pydantic import ValidationError
from rounds import rounds
from torch import Tensor, nn
from torch.nn import functional as F
from trainer_runs import Killed, MemoryReporter, killed_at

from trainer import losses
from trainer.config import TrainConfig
from trainer.config.lanes import LANE_FIELDS, shared
from trainer.config.optim import OPTIMIZERS
from trainer.data import TensorDataset
from trainer.errors import ConfigError, Fenced
from trainer.lanes.group import Group
from trainer.lanes.stacked_model import Stack, compare
from trainer.losses import weighted_sum
from trainer.report import Outcome, Report, Reporter, Verdict
from trainer.task import Loss, Task


def assert_parity(directory: Path, trials: Sequence[dict[str, Any]], rtol: float = 1e-9, **config: Any) -> list[OneOf]:
    """Each of them in one group, held against `fit`."""
    lanes = [OneOf(directory / f"lane{i}", **(config | own)) for i, own in enumerate(trials)]
    together(*lanes)
    for i, (lane, own) in enumerate(zip(lanes, trials, strict=True)):
        assert_close(lane, solo(directory / f"solo{i}", **(config | own)), rtol)
    return lanes


# --- As `fit`


class Square(Small):
    """Its gradients have full rank: of others, the bases that SOAP turns to are in part any."""

    def layers(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        return Loss((model(x) - x.cos()).square().sum(), len(x))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "sophia"])
def test_every_optimizer_steps_as_in_a_run_of_its_own(name, tmp_path):
    more: dict[str, Any] = {"update_every": 2} if name in ("soap", "shampoo") else {}
    rates = ((0.01, 0.0), (0.003, 0.2), (0.05, 0.01))
    task = Square if name == "soap" else Small
    assert_parity(
        tmp_path, [{"optim": {"name": name, "lr": lr, "weight_decay": wd} | more} for lr, wd in rates], task=task
    )


class OfParts(Small):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        out = model(x)
        parts = {
            "fit": Loss(F.cross_entropy(out, y, reduction="sum"), len(y)),
            "size": Loss(out.square().sum(), len(y)),
        }
        return weighted_sum(parts, {"fit": 1.0, "size": 0.1})


def test_a_weighted_sum_trains_in_lanes(tmp_path):
    assert_parity(tmp_path, [{"optim": {"lr": lr}} for lr in (0.01, 0.003)], task=OfParts)


SCHEDULES = (
    {"name": "cosine", "warmup_steps": 3, "min_lr": 1e-4},
    {"name": "one_cycle"},
    {"name": "wsd", "decay_ratio": 0.5},
    {"name": "step", "step_size": 1.0},
    {"name": "plateau", "plateau": {"patience": 0, "threshold": 0.9, "monitor": "train/loss"}},
    {"name": "constant"},
)


def test_every_lane_has_a_schedule_a_length_and_an_end_of_its_own(tmp_path):
    stopping = {"monitor": "val/loss", "patience": 1, "min_delta": 10.0}
    others = [{"schedule": one, "num_epochs": 2 + i % 2} for i, one in enumerate(SCHEDULES)]
    lanes = assert_parity(tmp_path, [*others, {"early_stopping": stopping, "num_epochs": 4}], optim={"lr": 0.01})
    assert [max(lane.reporter.epochs.values()) for lane in lanes] == [2, 3, 2, 3, 2, 3, 2]


class Drop(Small):
    def layers(self) -> nn.Module:
        rate = self.config.dropout
        return nn.Sequential(nn.Linear(6, 13), nn.Dropout(rate), nn.GELU(), nn.Dropout(0.2), nn.Linear(13, 3))


class Convolved(Small):
    """Of [batch, 6, 2, 2]."""

    def train_set(self) -> TensorDataset:
        x = torch.randn(SAMPLES, 6, 2, 2, dtype=self.dtype)
        return TensorDataset(x, torch.arange(SAMPLES) % 3)

    def layers(self) -> nn.Module:
        first = nn.Sequential(nn.Conv2d(6, 13, 2, padding=1), self.norm(), nn.ReLU(), nn.Dropout2d(self.config.dropout))
        return nn.Sequential(first, nn.Flatten(), nn.Linear(13 * 9, 3))

    def norm(self) -> nn.Module:
        return nn.Identity()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"val/mean": model(torch.randn(5, 6, 2, 2, dtype=self.dtype)).mean().item()}


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class DropTransposed(Small):
    """Dropout of what does not lie in the order of its indices."""

    def layers(self) -> nn.Module:
        mixed = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 5), Transposed(), nn.Dropout(0.4))
        return nn.Sequential(mixed, nn.Flatten(), nn.Linear(10, 3))


class DropChannels(Small):
    """Of whole channels, of samples that have one more dimension."""

    def layers(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (2, 3)), nn.Linear(3, 5), nn.Dropout1d(0.4), nn.Flatten(), nn.Linear(10, 3)
        )


class DropRows(DropChannels):
    """The same by Dropout2d, which takes what has three dimensions for a batch."""

    def layers(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (2, 3)), nn.Linear(3, 5), nn.Dropout2d(0.4), nn.Flatten(), nn.Linear(10, 3)
        )


@pytest.mark.filterwarnings("ignore:dropout2d. Received a 3D input:UserWarning")
@pytest.mark.parametrize("task", [Drop, Convolved, DropTransposed, DropChannels, DropRows])
def test_dropout_has_the_masks_of_the_trial_on_its_own_at_every_rate(task, tmp_path):
    given = [
        {"of": {"dropout": rate}, "seed": seed} for rate, seed in ((0.0, 0), (0.3, 1), (0.3, 2), (0.7, 0), (1.0, 1))
    ]
    assert_parity(tmp_path, given, task=task, micro_batch_size=7)


RULES = {
    "clip.norm": [{"clip": {"norm": norm}} for norm in (None, 0.3, 1e-3)],
    "clip.value": [{"clip": {"norm": norm, "value": value}} for norm, value in ((None, 0.01), (0.3, 0.1), (1.0, None))],
    "centralize": [{"gradients": {"centralize": True}, "clip": {"norm": norm}} for norm in (0.1, 1.0)],
    "normalize": [{"gradients": {"normalize": "parameter"}, "clip": {"norm": norm}} for norm in (0.1, 1.0)],
    "adaptive": [{"clip": {"adaptive": 0.05, "norm": norm}} for norm in (None, 0.1)],
    "per_parameter": [{"clip": {"per_parameter": 0.05, "value": value}} for value in (None, 0.01)],
    "noise": [{"gradients": {"noise": 0.1}, "seed": seed} for seed in (1, 2)],
    "lookahead": [{"optim": {"name": "sgd", "lr": lr, "wrap": "lookahead"}} for lr in LRS],
    "ema": [{"optim": {"lr": lr}, "average": {"name": "ema", "decay": 0.8}} for lr in LRS[1:4]],
    "swa": [{"optim": {"lr": lr}, "average": {"name": "swa", "start": 0.4}} for lr in LRS[1:4]],
    "micro-batches": [{"micro_batch_size": 5, "seed": seed} for seed in (0, 1, 1)],
    "groups": [{"optim": {"layer_decay": decay, "betas": (decay, 0.9), "eps": decay / 1e4}} for decay in (0.5, 0.9)],
    "momentum": [{"optim": {"name": "sgd", "momentum": momentum, "nesterov": True}} for momentum in (0.5, 0.9)],
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_between_gradient_and_weights_is_each_lanes_own(rule, tmp_path):
    assert_parity(tmp_path, RULES[rule])


def test_lanes_in_bf16_are_as_runs_in_bf16(tmp_path):
    class Single(Small):
        dtype = torch.float32

    assert_parity(
        tmp_path, [{"optim": {"name": "sgd", "lr": lr}} for lr in (0.1, 0.02)], 0.02, task=Single, precision="bf16"
    )


def test_lanes_in_fp32_are_as_runs_in_fp32(tmp_path):
    class Single(Small):
        dtype = torch.float32

    assert_parity(tmp_path, [{"optim": {"name": "sgd", "lr": lr}} for lr in (0.1, 0.02)], 2e-5, task=Single)


class Weighted(Small):
    """A weight of its own lane, another that grows over the run, and terms."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        out = model(x)
        fit, size = F.cross_entropy(out, y, reduction="sum"), out.square().sum()
        decay = (1 - self.config.weight / 3) ** 2 * (1 - self.progress / 3) + 0.01 * self.step
        total = decay * fit + (1 - decay) * size
        return Loss(total, len(y), {"fit": fit, "size": size, "right": (out.argmax(1) == y).sum()})


def test_losses_of_terms_and_weights_are_each_lanes_own(tmp_path):
    given = [{"of": {"weight": weight}, "num_epochs": epochs} for weight, epochs in ((0.1, 2), (1.7, 3), (0.1, 2))]
    lanes = assert_parity(tmp_path, given, 1e-6, task=Weighted, optim={"lr": 0.01})
    assert lanes[0].bits() == lanes[2].bits()
    assert lanes[0].numbers()[EPOCH, "train/fit"] != lanes[1].numbers()[EPOCH, "train/fit"]


class Unused(Small):
    """A layer that no loss comes from, and one that only some do."""

    def layers(self) -> nn.Module:
        return nn.ModuleDict({"body": super().layers(), "idle": nn.Linear(5, 5), "late": nn.Linear(3, 3)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        out = model["body"](x)  # pyright: ignore[reportIndexIssue]
        if len(y) < 16:  # as in the last window of an epoch
            out = model["late"](out)  # pyright: ignore[reportIndexIssue]
        return Loss(F.cross_entropy(out, y, reduction="sum"), len(y))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


def test_a_parameter_without_gradient_stays_as_it_is(tmp_path):
    optim = {"name": "adamw", "lr": 0.1, "weight_decay": 0.5}
    lanes = assert_parity(
        tmp_path, [{"seed": seed} for seed in (1, 2)], task=Unused, optim=optim, gradients={"noise": 0.1}
    )
    torch.manual_seed(0)
    assert lanes[0].task.net["idle"].weight.abs().max() <= 5**-0.5  # pyright: ignore


class Counting(nn.Module):
    """Buffers of its own that each forward pass moves: one in place, one put anew."""

    place: Tensor
    anew: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("anew", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.place += x.detach().mean(0)
            self.anew = self.anew + 1
        return x + 0.01 * self.anew + 0.1 * self.place


class Counted(Small):
    def layers(self) -> nn.Module:
        return nn.Sequential(super().layers(), Counting())


def test_buffers_that_a_forward_pass_moves_move_once_a_pass(tmp_path):
    assert_parity(tmp_path, [{"seed": seed} for seed in (1, 2)], task=Counted, micro_batch_size=7)


def test_data_of_another_length_has_another_number_of_windows(tmp_path):
    class Longer(Small):
        def train_set(self) -> TensorDataset:
            x = torch.randn(SAMPLES if self.config.train.seed < 2 else 50, 6, dtype=self.dtype)
            return TensorDataset(x, torch.arange(len(x)) % 3)

    assert_parity(tmp_path, [{"seed": seed} for seed in (2, 0, 3, 1)], task=Longer, batch_size=20)


class Partly(Small):
    """Counts by a mask, which may leave nothing of a window, and has a term of some micro-batches only."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        kept = y == 2
        losses = F.cross_entropy(model(x), y, reduction="none")
        terms = {"short": losses.sum()} if len(y) < 9 else {"long": losses.sum()}
        return Loss((losses * kept).sum(), kept.sum(), terms)


def test_empty_windows_and_partial_terms_are_as_in_a_run_of_its_own(tmp_path):
    config = {"batch_size": 11, "micro_batch_size": 9, "num_epochs": 3}
    lanes = assert_parity(tmp_path, [{"seed": seed} for seed in range(4)], task=Partly, **config)
    empty = {sum(v for (_, key), v in lane.numbers().items() if key == "train/empty_steps") for lane in lanes}
    assert len(empty) > 1


class Tuned(Small):
    """The first layer stays as it is, of each lane another."""

    def layers(self) -> nn.Module:
        net = super().layers()
        net.get_submodule("0").requires_grad_(False)
        return net


def test_parameters_that_are_not_trained_are_each_lanes_own(tmp_path):
    first, second = assert_parity(tmp_path, [{"seed": seed} for seed in (1, 2)], task=Tuned)
    frozen = [lane.saved()["model"]["0.weight"] for lane in (first, second)]
    assert not torch.equal(*frozen)


class Narrow(Small):
    """By itself it has memory for 9 samples."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if len(batch[1]) > 9:
            raise torch.OutOfMemoryError("what a GPU would say")
        return super().loss(model, batch)


def test_a_lane_goes_on_with_the_micro_batches_that_a_run_had_memory_for(tmp_path):
    trials = [OneOf(tmp_path / str(seed), Narrow, seed=seed) for seed in (0, 1)]
    assert trials[0].attempt(lambda read: read == 5).kind == "preempted"  # pyright: ignore
    trials[1].task_class = lambda _: Small(Whole(train=trials[1].config))
    together(*trials)
    assert_close(trials[1], solo(tmp_path / "whole", seed=1))
    halved = solo(tmp_path / "halved", Narrow, seed=0)
    assert halved.saved()["position"]["micro_batch_size"] == 8
    assert_close(trials[0], halved)


# --- Whoever trains beside it


class Single(Small):
    """In float32, where every other order of a sum would show."""

    dtype = torch.float32


class Plain(Single):
    def layers(self) -> nn.Module:
        inner = [nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 7), nn.Sigmoid(), nn.Linear(7, 13), nn.Softplus()]
        return nn.Sequential(nn.Linear(6, 13), nn.GELU(), nn.Dropout(0.2), *inner, nn.Linear(13, 3))


class Normed1d(Single):
    def layers(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 13), nn.BatchNorm1d(13), nn.SiLU(), nn.LayerNorm(13), nn.Linear(13, 3))


class NormedSequence(Single):
    def layers(self) -> nn.Module:
        first = [nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 13, 2, padding=1), nn.BatchNorm1d(13), nn.ELU(), nn.MaxPool1d(2)]
        return nn.Sequential(*first, nn.Flatten(), nn.Linear(26, 3))


class Normed2d(Convolved):
    dtype = torch.float32

    def norm(self) -> nn.Module:
        return nn.BatchNorm2d(13)


class Grouped(Convolved):
    dtype = torch.float32

    def norm(self) -> nn.Module:
        return nn.GroupNorm(13, 13)


class Embedded(Single):
    """Attention over tokens."""

    def train_set(self) -> TensorDataset:
        return TensorDataset(torch.randint(0, 11, (SAMPLES, 5)), torch.arange(SAMPLES) % 3)

    def layers(self) -> nn.Module:
        return nn.ModuleDict(
            {
                "tokens": nn.Embedding(11, 12),
                "mix": nn.MultiheadAttention(12, 3, batch_first=True),
                "out": nn.Linear(12, 3),
            }
        )

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(self._out(model, x), y, reduction="sum"), len(y))

    def _out(self, model: Any, x: Tensor) -> Tensor:
        x = model["tokens"](x)
        return model["out"](x + model["mix"](x, x, x)[0]).mean(1)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"val/mean": self._out(model, torch.randint(0, 11, (9, 5))).mean().item()}


class Tempered(Single):
    """With numbers that a lane has one of, which it takes through functions that processors have in two ways."""

    def layers(self) -> nn.Module:
        net = super().layers()
        net.register_parameter("scale", nn.Parameter(torch.tensor(0.7)))
        return net

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        out = model(x) * F.softplus(model.scale)  # pyright: ignore
        mean = F.cross_entropy(out, y)
        return Loss((mean**1.7 + mean.sigmoid() + F.gelu(mean)) * len(y), len(y), {"tanh": mean.tanh() * len(y)})


class WeightedSingle(Weighted):
    dtype = torch.float32


TASKS = (Plain, DropTransposed, Normed1d, NormedSequence, Normed2d, Grouped, Embedded, WeightedSingle, Tempered)


def some(directory: Path, task: type[Task], count: int = 3, **config: Any) -> list[OneOf]:
    """Trials that differ in all that lanes may differ in."""
    return [
        OneOf(
            directory / str(i),
            task,
            of={"weight": 0.3 + 0.07 * i, "dropout": 0.1 + 0.2 * (i % 3)},
            seed=i % 4,
            num_epochs=2 if i == 4 else 1,
            **config | {"optim": config.get("optim", {}) | {"lr": LRS[i] / 10, "weight_decay": LRS[-i]}},
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("task", TASKS)
def test_a_lane_is_the_same_to_the_bit_among_any_others_in_any_order(task, tmp_path):
    oracle = some(tmp_path / "alone", task, 5)
    for trial in oracle:
        together(trial)
        assert trial.kind() == "complete"
    assert len({trial.bits() for trial in oracle}) == 5
    drawn = random.Random(task.__name__)
    for count in (5, 2):
        trials = some(tmp_path / str(count), task, 5)
        chosen = drawn.sample(range(5), count)
        together(*(trials[i] for i in chosen))
        assert [trials[i].bits() for i in chosen] == [oracle[i].bits() for i in chosen], chosen


# Of those that sum alike one: by norms lamb, by the matrices of both sides soap.
IN_BITS = ["adam", "lamb", "adafactor", "sm3", "muon", "soap", "prodigy"]
IN_BITS += [pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "lars", "shampoo")]


@pytest.mark.parametrize("name", IN_BITS)
def test_optimizer_bits_do_not_depend_on_where_a_lanes_weights_lie(name, tmp_path):
    more = {"update_every": 2} if name in ("soap", "shampoo") else {}
    config = {"optim": {"name": name} | more, "clip": {"norm": 0.1, "value": 0.05}, "micro_batch_size": 5}
    oracle, trials = some(tmp_path / "alone", Plain, **config), some(tmp_path / "all", Plain, **config)
    together(*reversed(trials))
    for trial, one in zip(oracle, trials, strict=True):
        together(trial)
        assert one.bits() == trial.bits()


RULES_IN_BITS = {
    "adaptive": {"clip": {"adaptive": 0.05}, "gradients": {"centralize": True, "noise": 0.1}},
    "ema": {"average": {"name": "ema", "decay": 0.8}, "optim": {"wrap": "lookahead", "lookahead": {"k": 2}}},
    "bf16": {"precision": "bf16"},
    "plateau": {"schedule": {"name": "plateau", "plateau": {"patience": 0, "threshold": 0.9}}},
}


@pytest.mark.parametrize(
    ("task", "rule"),
    [
        *((Normed1d, rule) for rule in RULES_IN_BITS),
        *((Normed2d, rule) for rule in ("adaptive", "bf16")),
        *(pytest.param(Normed2d, rule, marks=pytest.mark.slow) for rule in ("ema", "plateau")),
    ],
)
def test_whatever_else_is_asked_for_leaves_lanes_their_bits(rule, task, tmp_path):
    oracle, trials = (
        some(tmp_path / "alone", task, **RULES_IN_BITS[rule]),
        some(tmp_path / "all", task, **RULES_IN_BITS[rule]),
    )
    together(*trials[2:], *trials[:2])
    for trial, one in zip(oracle, trials, strict=True):
        together(trial)
        assert (trial.kind(), one.bits()) == ("complete", trial.bits())


class Gated(Single):
    """With a few numbers of each lane, and no sample, that go through such functions: fewer than a vector holds."""

    def layers(self) -> nn.Module:
        net = super().layers()
        net.register_parameter("gate", nn.Parameter(torch.linspace(-1, 1, 13)))
        return net

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        gate = F.softplus(model.gate).pow(1.7).sum()  # pyright: ignore
        loss = super().loss(model, batch)
        return Loss(loss.sum * gate, loss.count)


@pytest.mark.parametrize(("task", "count"), [(Plain, 35), (Tempered, 35), (Gated, 5)])
def test_the_number_of_lanes_leaves_all_of_them_their_bits(task, count, tmp_path):
    """Also of what is computed from so few numbers that those of several lanes fill a processor's vector."""
    many = [OneOf(tmp_path / f"many{i}", task, seed=i, num_epochs=1) for i in range(count)]
    together(*many)
    for i in (0, 7 % count, 13 % count, count - 1):
        assert many[i].bits() == alone(tmp_path / f"alone{i}", task, seed=i, num_epochs=1).bits(), i


# --- Cut and resumed


@pytest.fixture(scope="module")
def uncut(tmp_path_factory) -> dict[int, str]:
    """The bits of trials by their seed, each the only lane, without a break."""
    path = tmp_path_factory.mktemp("uncut")
    trials = [alone(path / str(seed), seed=seed, **CUTS) for seed in range(3)]
    assert {trial.kind() for trial in trials} == {"complete"}
    return {seed: trial.bits() for seed, trial in enumerate(trials)}


SAMPLED = (1, 2, EPOCH + 1, 2 * EPOCH)
STEPS = [pytest.param(i, marks=() if i in SAMPLED else pytest.mark.slow) for i in range(1, 2 * EPOCH + 1)]


@pytest.mark.parametrize("step", STEPS)
def test_lanes_killed_before_any_step_end_the_same_in_other_groups(step, tmp_path, uncut):
    every = CUTS | {"checkpoint": {"every_steps": 1}}
    trials = [OneOf(tmp_path / str(seed), seed=seed, **every) for seed in range(2)]
    with pytest.raises(Killed):
        together(*trials, cuts={trials[1]: killed_at(step)})
    newcomer = OneOf(tmp_path / "new", seed=2, **every)
    together(newcomer, trials[1])
    together(trials[0])
    assert [trial.bits() for trial in (*trials, newcomer)] == [uncut[seed] for seed in range(3)]


@pytest.mark.parametrize("step", STEPS)
def test_a_lane_that_leaves_before_any_step_goes_on_from_there(step, tmp_path, uncut):
    trials = [OneOf(tmp_path / str(seed), seed=seed, **CUTS) for seed in range(2)]
    together(*trials, cuts={trials[1]: lambda read: read == step})
    assert [trial.kind() for trial in trials] == ["complete", "preempted"]
    left = trials[1].outcome
    assert isinstance(left, Outcome)
    assert [left.step] == [ref.step for ref in trials[1].reporter.committed[:1] or [left]] == [step - 1]
    newcomer = OneOf(tmp_path / "new", seed=2, **CUTS)
    together(newcomer, later={1: [trials[1]]})
    assert [trial.bits() for trial in (*trials, newcomer)] == [uncut[seed] for seed in range(3)]


@pytest.mark.parametrize("step", [2, EPOCH + 1, EPOCH + 2])
def test_a_lanes_checkpoint_is_a_runs_and_the_other_way_round(step, tmp_path):
    config: dict[str, Any] = CUTS | {"optim": {"name": "sgd", "lr": 0.1}, "task": Drop}
    first = OneOf(tmp_path / "first", seed=1, **config)
    together(OneOf(tmp_path / "beside", **config), first, cuts={first: lambda read: read == step})
    first.outcome = first.attempt()
    second = OneOf(tmp_path / "second", seed=1, **config)
    assert second.attempt(lambda read: read == step).kind == "preempted"  # pyright: ignore
    together(OneOf(tmp_path / "other", **config), second)
    oracle = solo(tmp_path / "oracle", seed=1, **config)
    for trial in (first, second):
        assert_close(trial, oracle)


@pytest.mark.parametrize("task", [Cut, WeightedSingle])
def test_a_lane_may_join_those_that_are_epochs_ahead(task, tmp_path):
    config: dict[str, Any] = {"task": task, "num_epochs": 3}
    ahead = [OneOf(tmp_path / f"ahead{seed}", seed=seed, **config) for seed in (0, 1)]
    joining = OneOf(tmp_path / "joining", seed=2, **config)
    together(*ahead, later={1: [joining]})
    for seed, trial in enumerate((*ahead, joining)):
        assert trial.bits() == alone(tmp_path / f"alone{seed}", seed=seed, **config).bits()


# --- One lane's matter


class NormedDouble(Small):
    def layers(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 13), nn.BatchNorm1d(13), nn.Tanh(), nn.Linear(13, 3))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if self.config.hidden == 13.0:
            raise ValueError("thirteen")
        return super().loss(model, batch)


BESIDE: dict[str, Any] = {"task": NormedDouble, "num_epochs": 3, "optim": {"name": "sgd", "lr": 0.1}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[str]:
    path = tmp_path_factory.mktemp("undisturbed")
    return [alone(path / str(seed), seed=seed, **BESIDE).bits() for seed in (0, 1)]


def disturbed(directory: Path, by: OneOf, **given: Any) -> list[str]:
    """The bits of two trials with `by` between them."""
    first, last = (OneOf(directory / f"beside{seed}", seed=seed, **BESIDE) for seed in (0, 1))
    together(first, by, last, **given)
    assert (first.kind(), last.kind()) == ("complete", "complete")
    return [first.bits(), last.bits()]


def test_a_lane_that_trained_no_step_is_infeasible_beside_others_that_do(tmp_path):
    """Three steps, fewer than the guard's ten in a row."""

    class Weighted(Small):
        def loss(self, model: nn.Module, batch: Any) -> Loss:
            return super().loss(model, batch).times(self.config.weight)

    given: dict[str, Any] = {"task": Weighted, "num_epochs": 1}
    never, other = (OneOf(tmp_path / str(weight), of={"weight": weight}, **given) for weight in (math.nan, 1.0))
    together(never, other)
    assert (never.kind(), other.kind()) == ("nonfinite", "complete")
    assert never.outcome == solo(tmp_path / "solo", of={"weight": math.nan}, **given).outcome


def test_a_lane_that_diverges_skips_its_steps_and_ends_as_on_its_own(tmp_path, undisturbed):
    config = BESIDE | {"optim": {"name": "sgd", "lr": 1e200}, "clip": {"norm": None}, "num_epochs": 5}
    lane = OneOf(tmp_path / "lane", **config)
    assert disturbed(tmp_path, lane) == undisturbed
    assert lane.kind() == "nonfinite"
    oracle = solo(tmp_path / "solo", **config)
    assert lane.outcome == oracle.outcome
    assert lane.reporter.events == oracle.reporter.events
    assert lane.numbers()[EPOCH, "train/skipped_steps"] == oracle.numbers()[EPOCH, "train/skipped_steps"] > 0
    statistics = [[value for key, value in leaves(one.saved()).items() if "running" in key] for one in (lane, oracle)]
    assert len(statistics[0]) == 2
    torch.testing.assert_close(*statistics)


def test_a_lane_that_raises_at_its_first_window_ends_alone(tmp_path, undisturbed):
    lane = OneOf(tmp_path / "lane", of={"hidden": 13.0}, **BESIDE)
    assert disturbed(tmp_path, lane) == undisturbed
    assert (type(lane.outcome), str(lane.outcome)) == (ValueError, "thirteen")


@pytest.mark.parametrize(
    ("kind", "ends"), [("stop", "pruned"), ("pause", "paused"), ("restart_from", "restarted"), ("leave", "preempted")]
)
def test_a_verdict_is_one_lanes(kind, ends, tmp_path, undisturbed):
    lane = OneOf(tmp_path / "lane", verdict=lambda step, metrics, epoch: Verdict(kind, step), **BESIDE)
    assert disturbed(tmp_path, lane) == undisturbed
    assert lane.outcome == Outcome(ends, step=EPOCH, epoch=1)
    assert [ref.step for ref in lane.reporter.committed] == [EPOCH]


def fence(read: int) -> bool:
    if read == EPOCH + 2:
        raise Fenced("another attempt has it")
    return False


def test_a_lane_that_is_fenced_is_dropped_alone(tmp_path, undisturbed):
    lane = OneOf(tmp_path / "lane", **BESIDE)
    assert disturbed(tmp_path, lane, cuts={lane: fence}) == undisturbed
    assert isinstance(lane.outcome, Fenced)
    assert sorted({step for step, _ in lane.numbers()}) == [EPOCH]


def test_a_lane_whose_commit_is_refused_is_dropped_alone(tmp_path, undisturbed):
    lane = OneOf(tmp_path / "lane", **BESIDE)
    error = Fenced("another attempt has it")

    def commit(reports: Sequence[tuple[Reporter, Report]], wait: bool) -> list[Any]:
        return [
            error if one.reporter is lane.reporter else each([(one.reporter, one.report)], wait)[0]
            for one in map(Asked, reports)
        ]

    assert disturbed(tmp_path, lane, commit=commit) == undisturbed
    assert lane.outcome is error
    assert lane.numbers() == {}


class Asked:
    def __init__(self, asked: tuple[Reporter, Report]) -> None:
        self.reporter, self.report = asked


def test_a_lane_without_a_verdict_waits_and_is_asked_for_again(tmp_path, undisturbed):
    lane = OneOf(tmp_path / "lane", **BESIDE)
    asked: list[tuple[int, bool]] = []

    def commit(reports: Sequence[tuple[Reporter, Report]], wait: bool) -> list[Any]:
        answers: list[Any] = []
        for reporter, report in reports:
            mine = reporter is lane.reporter
            asked.extend([(report.step, wait)] * mine)
            answers.append(None if mine and len(asked) < 5 else each([(reporter, report)], wait)[0])
        return answers

    assert disturbed(tmp_path, lane, commit=commit) == undisturbed
    assert asked[:5] == [(EPOCH, False), (EPOCH, False), (EPOCH, False), (EPOCH, True), (EPOCH, True)]
    assert lane.bits() == alone(tmp_path / "alone", **BESIDE).bits()


def test_each_lane_keeps_the_checkpoints_that_it_would_keep(tmp_path):
    keep = {"keep_last": 1, "keep_best": 2, "monitor": "val/loss", "every_steps": 3}
    config = BESIDE | {"num_epochs": 4, "checkpoint": keep}
    trials = [OneOf(tmp_path / str(seed), seed=seed, **config) for seed in range(3)]
    together(*trials)
    kept = []
    for seed, trial in enumerate(trials):
        oracle = alone(tmp_path / f"alone{seed}", seed=seed, **config)
        kept.append([ref.step for ref in trial.reporter.committed])
        assert kept[-1] == [ref.step for ref in oracle.reporter.committed]
        assert {path.name for path in trial.directory.iterdir()} == {ref.path.name for ref in trial.reporter.committed}
    assert len({tuple(steps) for steps in kept}) > 1


# --- Memory


def little_memory(monkeypatch: pytest.MonkeyPatch, most: int, at: int) -> None:
    """From step `at` on there is memory for a pass over `most` lanes, of others it runs out when they are half over."""
    whole, one = Stack.pass_over, Stack._pass

    def passed(stack: Stack, micro_step: int, batches: Sequence[Any]) -> Any:
        found = one(stack, micro_step, batches)
        if len(stack.lanes) > most and stack.lanes[0].state.step >= at:
            raise torch.OutOfMemoryError("what a GPU would say")
        return found

    monkeypatch.setattr(Stack, "_pass", passed)
    assert whole is Stack.pass_over


@pytest.mark.parametrize(("most", "stay"), [(3, 3), (2, 1)])
def test_lanes_that_memory_does_not_hold_make_way_for_half_of_them(most, stay, tmp_path, monkeypatch, uncut):
    little_memory(monkeypatch, most, at=2)
    trials = [OneOf(tmp_path / str(seed), seed=seed % 3, **CUTS) for seed in range(7)]
    together(*trials)
    assert [trial.kind() for trial in trials] == ["complete"] * stay + ["preempted"] * (7 - stay)
    assert [trial.reporter.committed[0].step for trial in trials[stay:]] == [2] * (7 - stay)
    said = [fields["lanes"] for kind, fields in trials[0].reporter.events if kind == "out_of_memory"]
    assert said == ([3] if stay == 3 else [3, 1])
    for trial in trials[stay:]:
        together(trial)
    assert [trial.bits() for trial in trials] == [uncut[seed % 3] for seed in range(7)]


def test_a_lane_that_is_fenced_as_it_tells_of_memory_ends_alone(tmp_path, monkeypatch, undisturbed):
    class Lost(MemoryReporter):
        def event(self, kind: str, **fields: Any) -> None:
            raise Fenced("another attempt has it")

    little_memory(monkeypatch, 3, at=0)
    trials = [OneOf(tmp_path / str(i), seed=max(i - 1, 0), **BESIDE) for i in range(6)]
    trials[0].reporter = Lost()
    together(*trials)
    assert isinstance(trials[0].outcome, Fenced)
    assert [trial.kind() for trial in trials[1:]] == ["complete"] * 2 + ["preempted"] * 3
    assert [trial.bits() for trial in trials[1:3]] == undisturbed


def test_a_group_is_as_large_as_memory_was_from_then_on(tmp_path, monkeypatch):
    little_memory(monkeypatch, 2, at=0)
    trials = [OneOf(tmp_path / str(seed), seed=seed, lanes=5, **BESIDE) for seed in range(5)]
    with Group(trials[0].config, each) as group:
        for trial in trials:
            trial.enter(group)
        assert group.room == 0
        assert sorted(how.kind for _, how in group.advance() if isinstance(how, Outcome)) == ["preempted"] * 3
        assert (group.size, group.room) == (2, 0)


def test_one_lane_that_memory_does_not_hold_ends_so(tmp_path, monkeypatch):
    little_memory(monkeypatch, 0, at=3)
    trial = alone(tmp_path, **BESIDE)
    assert isinstance(trial.outcome, torch.OutOfMemoryError)


# --- What is refused


def refusals(directory: Path, task: type[Task], *trials: dict[str, Any], **config: Any) -> list[str]:
    """The sentences in which the trials, trained together, are refused; "" of one that is not."""
    lanes = [OneOf(directory / str(i), task, **(config | own)) for i, own in enumerate(trials)]
    with Group(lanes[0].config, each) as group:
        entered = {}
        for one in lanes:
            try:
                entered[one.enter(group)] = one
            except ConfigError as error:
                one.outcome = error
        while group.lanes:
            for lane, how in group.advance():
                entered[lane].outcome = how
    for one in lanes:
        assert isinstance(one.outcome, ConfigError) or one.kind() == "complete"
    return [str(one.outcome) if isinstance(one.outcome, ConfigError) else "" for one in lanes]


TWO = {"seed": 0}, {"seed": 1}

CONTRADICTIONS = {
    "parallel": {"parallel": {"data": 2}},
    "folds": {"folds": 2},
    "compile": {"compile": True},
    "precision": {"precision": "fp16"},
    "num_workers": {"num_workers": 1},
    "batch_growth": {"batch_growth": {"epochs": [1]}},
    "schedule.one_cycle.momentum": {"schedule": {"name": "one_cycle", "one_cycle": {"momentum": [0.8, 0.9]}}},
    "micro_batch_size": {"micro_batch_size": "auto"},
    "memory_limit": {"memory_limit": "1GiB"},
    "optim.name": {"optim": {"name": "sophia"}},
    "optim.wrap": {"optim": {"wrap": "sam"}},
    "activations.checkpoint": {"activations": {"checkpoint": "selective"}},
    "activations.offload": {"activations": {"offload": "cpu"}},
    "gradients.penalty": {"gradients": {"penalty": 1.0}},
    "gradients.conflicts": {"gradients": {"conflicts": "pcgrad"}},
    "gradients.balance": {"gradients": {"balance": "gradnorm"}},
    "gradients.noise_scale": {"gradients": {"noise_scale": True}, "micro_batch_size": 4},
    "rollback.enabled": {"rollback": {"enabled": True}},
    "checkpoint.asynchronous": {"checkpoint": {"asynchronous": True}},
}


@rounds("field", CONTRADICTIONS)
def test_what_lanes_cannot_do_is_refused_with_the_configuration(field, tmp_path):
    TrainConfig.model_validate(CONTRADICTIONS[field])
    with pytest.raises(
        ValidationError, match=rf"lanes is 2: .* cannot do with {field}.*; leave {field} out, or lanes=1\."
    ):
        TrainConfig.model_validate(CONTRADICTIONS[field] | {"lanes": 2})


class Recurrent(Small):
    def layers(self) -> nn.Module:
        return nn.ModuleDict({"rnn": nn.LSTM(6, 5), "out": nn.Linear(5, 3)})

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        found = model["rnn"](x[None])[0][0]  # pyright: ignore[reportIndexIssue]
        return Loss(F.cross_entropy(model["out"](found), y, reduction="sum"), len(y))  # pyright: ignore[reportIndexIssue]


class DrawsTorch(Small):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, (batch[0] + torch.rand(6, dtype=self.dtype), batch[1]))


class DrawsNumpy(Small):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, (batch[0] * np.random.rand(), batch[1]))


class DrawsPython(Small):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return super().loss(model, (batch[0] * random.random(), batch[1]))


class Branches(Small):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.sum * 2, loss.count) if loss.sum > 1.0 else loss


WHY = {Recurrent: "aten::lstm", DrawsTorch: "it draws random numbers", Branches: "it branches by a tensor"}


@pytest.mark.parametrize("task", WHY)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_what_vmap_cannot_do_is_said_with_the_place_of_the_loss(task, tmp_path):
    task.evaluate = lambda self, model: {}
    said = refusals(tmp_path, task, *TWO)
    assert said[0] == said[1]
    start = rf"train.lanes: loss\(\) of {task.__name__} \(test_lanes.py:\d+\) works for a trial on its own and not"
    assert re.match(start, said[0]), said[0]
    assert said[0].endswith(": correct that, or set train.lanes=1.")
    assert re.search(r" at once in line \d+ \(", said[0]) and WHY[task] in said[0]


@rounds("task", [DrawsNumpy, DrawsPython])
@rounds("seeds", [(0, 0), (0, 1)])
def test_numbers_drawn_elsewhere_than_by_dropout_are_refused(task, seeds, tmp_path):
    said = refusals(tmp_path, task, *({"seed": seed} for seed in seeds))
    start = rf"train.lanes: loss\(\) of {task.__name__} \(test_lanes.py:\d+\) draws from the generator of numpy"
    assert [bool(re.match(start, one)) for one in said] == [True, True], said


def test_a_model_of_another_shape_is_refused_at_its_admission(tmp_path):
    class Wider(Small):
        lane_fields = ("hidden",)

        def layers(self) -> nn.Module:
            return nn.Sequential(nn.Linear(6, int(self.config.hidden)), nn.ELU(), nn.Linear(int(self.config.hidden), 3))

    said = refusals(tmp_path, Wider, *({"of": {"hidden": width}} for width in (5.0, 7.0, 5.0)))
    assert (said[0], said[2]) == ("", "")
    assert said[1] == (
        "train.lanes: the models of two trials differ in '0' of Sequential: only numbers that shape no model may "
        "differ between lanes; take what shapes it out of the task's lane_fields."
    )


def test_undeclared_lane_differences_are_found_by_the_gradient(tmp_path):
    class Hidden(Small):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.weight = config.hidden

        def loss(self, model: nn.Module, batch: Any) -> Loss:
            loss = super().loss(model, batch)
            return Loss(loss.sum * self.weight, loss.count)

    said = refusals(tmp_path, Hidden, *({"of": {"hidden": weight}} for weight in (1.0, 1 + 1e-6, 1.0)))
    assert (said[0], said[2]) == ("", "")
    assert said[1].startswith("train.lanes: the gradient that this trial has among others is not its own: ")


def test_smoothing_of_cross_entropy_may_be_each_lanes_own(tmp_path):
    class Smoothed(Small):
        lane_fields = ("hidden",)

        def loss(self, model: nn.Module, batch: Any) -> Loss:
            return losses.cross_entropy(model(batch[0]), batch[1], label_smoothing=self.config.hidden)

    lanes = assert_parity(tmp_path, [{"of": {"hidden": one}} for one in (0.0, 0.1, 0.3)], 1e-6, task=Smoothed)
    assert len({lane.bits() for lane in lanes}) == 3


@pytest.mark.parametrize("where", ["train_set", "augment"])
def test_data_that_differ_between_lanes_are_found_by_the_batches(tmp_path, where):
    """Lanes of one seed read once for all of them."""

    class Noisy(Small):
        lane_fields = ("hidden",)

        def train_set(self) -> TensorDataset:
            x = torch.randn(SAMPLES, 6, dtype=self.dtype) * (self.config.hidden if where == "train_set" else 1.0)
            return TensorDataset(x, torch.arange(SAMPLES) % 3)

        def augment(self, sample: Any, generator: torch.Generator) -> Any:
            return (sample[0] * self.config.hidden, sample[1]) if where == "augment" else sample

    said = refusals(tmp_path, Noisy, *({"of": {"hidden": scale}} for scale in (1.0, 1 + 1e-6, 1.0)))
    assert (said[0], said[2]) == ("", "")
    assert said[1].startswith("train.lanes: the batches that this trial reads are not those of the lane that it would")
    other = {"of": {"hidden": 2.0}, "seed": 1}
    assert refusals(tmp_path / "seeds", Noisy, {"of": {"hidden": 1.0}}, other) == ["", ""]


def test_a_convolution_that_rounds_by_the_number_of_lanes_is_refused(tmp_path):
    """oneDNN adds up few channels of maps of one point in an order that depends on how many groups there are."""

    class Squeezed(Single):
        def layers(self) -> nn.Module:
            maps = (nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 3, 1), nn.Conv2d(3, 8, 1))
            return nn.Sequential(*maps, nn.Flatten(), nn.Linear(8, 3))

    said = refusals(tmp_path, Squeezed, {}, {})
    assert all(one.startswith("train.lanes: a convolution of maps of one point with 3 outputs") for one in said)


def test_batches_of_other_shapes_are_refused(tmp_path):
    class Cropped(Small):
        def train_set(self) -> TensorDataset:
            length = 4 + self.config.train.seed
            return TensorDataset(torch.randn(SAMPLES, length, 6, dtype=self.dtype), torch.arange(SAMPLES) % 3)

        def loss(self, model: nn.Module, batch: Any) -> Loss:
            return super().loss(model, (batch[0].mean(1), batch[1]))

    assert (
        refusals(tmp_path, Cropped, *TWO)
        == [
            "train.lanes: batches of (16, 4, 6) and of another shape cannot be stacked: give all samples one shape, "
            "or set train.lanes=1."
        ]
        * 2
    )


def test_batch_norm_of_one_sample_is_refused_as_in_a_run_of_its_own(tmp_path):
    config = {"task": NormedDouble, "batch_size": SAMPLES - 1, "num_epochs": 1}
    with pytest.raises(ConfigError, match="batch norm cannot be trained on one sample") as raised:
        solo(tmp_path / "solo", **config)
    with pytest.raises(ConfigError, match=re.escape(str(raised.value))):
        alone(tmp_path / "lane", **config)


def test_a_newcomer_that_cannot_train_with_the_group_is_refused_alone(tmp_path):
    class Longer(Small):
        def train_set(self) -> TensorDataset:
            length = 5 if self.config.train.seed == 2 else 4
            return TensorDataset(torch.randn(SAMPLES, length, 6, dtype=self.dtype), torch.arange(SAMPLES) % 3)

        def loss(self, model: nn.Module, batch: Any) -> Loss:
            return super().loss(model, (batch[0].mean(1), batch[1]))

    ahead = [OneOf(tmp_path / str(seed), Longer, seed=seed) for seed in (0, 1)]
    newcomer = OneOf(tmp_path / "new", Longer, seed=2)
    together(*ahead, later={1: [newcomer]})
    assert isinstance(newcomer.outcome, ConfigError)
    oracle = [alone(tmp_path / f"alone{seed}", Longer, seed=seed).bits() for seed in (0, 1)]
    assert [trial.bits() for trial in ahead] == oracle


def test_a_gradient_that_is_not_finite_among_others_alone_is_not_its_own():
    with pytest.raises(ConfigError, match="not its own"):
        compare(torch.ones(3), torch.tensor([1.0, 1.0, torch.nan]), "fp32")
    compare(torch.tensor([1.0, torch.inf]), torch.tensor([1.0, torch.nan]), "fp32")


def test_parameters_of_two_dtypes_are_refused(tmp_path):
    class Mixed(Small):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(6, 5).double(), nn.Linear(5, 3))

    assert (
        refusals(tmp_path, Mixed, *TWO)
        == [
            "train.lanes: Sequential has trained parameters of "
            f"{' and '.join(map(str, {torch.float64, torch.float32}))}: give them one dtype, or set train.lanes=1."
        ]
        * 2
    )


# --- What lanes have in common


def test_lanes_share_all_but_the_fields_that_are_their_own():
    train = TrainConfig(lanes=4).model_dump(mode="json")
    config = {"train": train, "model": {"dropout": 0.1, "width": 8}}
    common = shared(config, ("model.dropout", "model.missing", "nothing.here"))
    assert config["train"] == TrainConfig(lanes=4).model_dump(mode="json")
    assert common["model"] == {"width": 8}
    left, gone = leaves(common["train"]).keys(), {f"/{field[6:].replace('.', '/')}" for field in LANE_FIELDS}
    assert gone & left == set()
    assert all(any(path == one or path.startswith(f"{one}/") for one in gone) for path in leaves(train).keys() - left)


def test_configurations_of_one_group_differ_in_nothing_else():
    one, lanes = TrainConfig(lanes=4).model_dump(mode="json"), []
    for changed in ({"seed": 9}, {"optim": {"lr": 0.3, "eps": 1e-3}}, {"clip": {"value": 2.0}}, {"num_epochs": 77}):
        lanes.append(TrainConfig.model_validate({"lanes": 4} | changed).model_dump(mode="json"))
    assert all(shared({"train": lane}) == shared({"train": one}) for lane in lanes)
    for changed in ({"batch_size": 9}, {"optim": {"name": "sgd"}}, {"clip": {"adaptive": 0.1}}, {"lanes": 5}):
        lane = TrainConfig.model_validate({"lanes": 4} | changed).model_dump(mode="json")
        assert shared({"train": lane}) != shared({"train": one}), changed
    assert shared({}) == {}


@rounds("dtype", [torch.float32, torch.float64])
def test_products_round_alike_wherever_their_operands_begin(dtype):
    def placed(matrix: torch.Tensor, offset: int) -> torch.Tensor:
        memory = torch.zeros(matrix.numel() + offset, dtype=dtype)
        return memory[offset:].view(matrix.shape).copy_(matrix)

    draws = torch.Generator().manual_seed(0)
    for m, k, n in ((10, 13, 7), (13, 10, 6), (20, 9, 5), (64, 13, 13)):
        a, b = (torch.randn(*shape, generator=draws, dtype=dtype) for shape in ((m, k), (n, k)))
        expected = a @ b.t()
        for offset, other in ((1, 0), (0, 1), (5, 2), (13, 4)):
            assert torch.equal(placed(a, offset) @ placed(b, other).t(), expected), (m, k, n, offset, other)
