"""Digests of the trainer's parts: of what each of them does, whatever its code looks like.

Every part that all trainings use is digested by itself as far as it can be: the step with weights, data and an
optimizer that seeds and tables do not reach, the checkpoint with weights that move by fixed amounts, and so on. What a
training uses only where it is asked for stands in golden_features.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import golden_data
import golden_optim
import golden_ranks
import numpy as np
import torch
from golden_features import FEATURES
from golden_hash import digest
from golden_task import BASE, SAMPLES, WALK, Rows, Tiny, labelled, trail, trained
from torch import nn
from torch.nn.functional import cross_entropy

from trainer.config import TrainConfig
from trainer.data import Loader, TensorDataset
from trainer.runtime.seeding import derive, seed_all
from trainer.task import Loss


def digests(*, every: bool = True) -> dict[str, str | None]:
    """Returns part -> digest of what it does; None for what starts processes of its own, unless `every` one is wanted.

    The digests are of this code's numbers with the processor pinned (golden_record.PINNED). That of a part that fails
    says how, so that all others are compared all the same.
    """
    parts = golden_optim.OPTIMIZATION | {f"trainer {name}": part for name, part in (ALWAYS | FEATURES).items()}
    ranks = {"trainer ranks": _digest(golden_ranks.ranks) if every else None}
    return {name: _digest(part) for name, part in parts.items()} | ranks


def _digest(part: Callable[[], Any]) -> str:
    try:
        return digest(part())
    except Exception as error:
        return f"fails: {type(error).__name__}: {error}"


# --- Step


class Uneven(Tiny):
    """Batch norm, a frozen layer, samples that count differently, and three windows not to be trained on."""

    def layers(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
        net[3].requires_grad_(False)
        return net

    def lr_scale(self, progress: float) -> float:
        return 1.0 if progress < 0.5 else 0.25

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        counted = (x[:, 2] > -0.5) & (self.step != 5)
        each = cross_entropy(model(x), y, reduction="none")
        spoilt = torch.nan if self.step in (2, 7) else 1.0
        total = torch.where(counted, each, 0.0).sum() * spoilt
        return Loss(total, counted.sum(), {"progress": torch.tensor(self.progress) * counted.sum()})


class Spoilt(Tiny):
    """From its third window on no loss is finite."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return loss if self.step < 2 else loss.times(torch.inf)


def step() -> Any:
    """Returns trainings by whole windows and by micro-batches, the last of them smaller; with gradients as they are and
    clipped by their norm; and with windows that are not finite or empty."""
    ways: dict[str, Any] = {
        "accumulated": {},
        "whole": {"micro_batch_size": None},
        "unclipped": {"clip": {"norm": None}},
        "clipped": {"clip": {"norm": 0.1}, "micro_batch_size": 3},
        "uneven": {"task": lambda: Uneven(None), "num_epochs": 4},
        "spoilt": {"task": lambda: Spoilt(None), "guard": {"max_consecutive": 3}},
    }
    return {name: trail(trained(**way)) for name, way in ways.items()}


# --- Data order


class Numbered(Tiny):
    """Samples that are their own numbers; keeps those that are trained on at each step."""

    def __init__(self, steps: list[Any] | None = None) -> None:
        super().__init__(None)
        self.steps = steps

    def train_set(self) -> TensorDataset:
        return TensorDataset(torch.arange(23))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        assert self.steps is not None
        self.steps.append([self.step, batch[0].tolist()])
        return Loss(sum(p.sum() for p in model.parameters()) * 0.0, len(batch[0]))


def data_order() -> Any:
    """Returns the samples of each micro-batch of each window and epoch, entered at several windows, by one process and
    by each of several ranks."""
    ways: list[dict[str, Any]] = [
        {},
        {"seed": 3},
        {"seed": 2**40 + 1, "batch_size": 7, "micro_batch_size": 3},
        {"batch_size": 7, "drop_last": True},
        {"batch_size": 100, "drop_last": True},
        {"batch_size": 1},
        {"batch_size": 9, "micro_batch_size": 2},
    ]
    shares = [(0, 1, 1), (0, 1, 2), (0, 2, 1), (1, 2, 1), (2, 3, 2)]  # which of how many, samples of a pass at least
    steps: list[Any] = []
    trained(lambda: Numbered(steps), seed=2, leave_at=5)
    return [[_windows(way, *share) for share in shares] for way in ways], steps


def _windows(way: dict[str, Any], share: int, shares: int, least: int) -> Any:
    config = TrainConfig.model_validate(BASE | {"micro_batch_size": None} | way)
    loader = Loader(Numbered(), config, torch.device("cpu"), share, shares, least=least)
    entered = [(0, 0), (1, 0), (1, 1), (4, loader.sampler.windows - 1)]
    return [[_plain(window) for window in loader.epoch(epoch, position)] for epoch, position in entered]


def _plain(window: list[Any]) -> list[Any]:
    """The indices of a window's micro-batches, in a list of their own where they only fill a rank's turn."""
    return [[batch[0][0].tolist()] if hasattr(batch, "batch") else batch[0].tolist() for batch in window]


# --- Seeding


def drawn() -> list[Any]:
    """Returns what each of the global generators gives next."""
    return [torch.rand(2), np.random.rand(2), random.random(), random.getrandbits(40)]


class Drawing(Tiny):
    """Draws random numbers wherever a task may."""

    def __init__(self, draws: list[Any]) -> None:
        super().__init__(None)
        self.draws = draws

    def layers(self) -> nn.Module:
        self.draws.append(["model", drawn()])
        return super().layers()

    def train_set(self) -> Any:
        self.draws.append(["train_set", drawn()])
        return DrawingRows(*labelled(SAMPLES, seed=1))

    def augment(self, sample: Any, generator: torch.Generator) -> Any:
        return *sample, torch.rand(2, generator=generator)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        *_, read, augmented = batch
        self.draws.append([self.step, read, augmented, drawn()])
        return Loss(sum(p.sum() for p in model.parameters()) * 0.0, len(read))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.draws.append(["evaluate", self.step, drawn()])
        return {}


class DrawingRows(Rows):
    """Draws for each sample that is read."""

    draws = True

    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), torch.from_numpy(np.random.rand(1)), torch.rand(1), random.random()


def seeding() -> Any:
    """Returns what the generators give at each place that a task may draw at, in this process and in those that load
    its data; and the seeds of some streams."""
    draws: list[Any] = []
    for way in ({}, {"seed": 7}, {"seed": 7, "num_workers": 2}, {"leave_at": 4}):
        trained(lambda: Drawing(draws), num_epochs=2, **way)
    seeds = [derive(seed, stream, *counters) for seed in (0, 1, 2**62) for stream, *counters in STREAMS]
    for value in (0, 5, 2**33 + 1):
        seed_all(value)
        draws.append(drawn())
    return {"draws": draws, "seeds": seeds}


STREAMS: tuple[Any, ...] = (("init",), ("step", 3, 1), ("step", 3, 1, 1), ("weights/0.weight",), ("augment", 2, 9))


# --- Checkpoint


class Walking(Tiny):
    """Weights that move by fixed amounts, and metrics that are given."""

    values = (0.5, 0.25, 0.375, 0.3, 0.25, 0.75)

    def layers(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        net[2].weight.requires_grad_(False)
        return net

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        zero = sum(p.sum() for p in model.parameters()) * 0.0
        return Loss(zero + 3.0 * len(x), len(x), {"halves": torch.tensor(0.5) * len(x)})

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"val/loss": self.values[self.step * len(self.values) // 25]}


def checkpoint() -> Any:
    """Returns the steps at which checkpoints are saved and kept, and all that the newest holds; of trainings in one go,
    and of some that left and went on."""
    walk = {"task": lambda: Walking(None), "optim": WALK, "num_epochs": 6, "checkpoint": {}}
    best = {"keep_last": 1, "keep_best": 2, "monitor": "val/loss"}
    ways: dict[str, Any] = {
        "epochs": {},
        "every": {"checkpoint": {"every_epochs": 4, "every_steps": 3, "keep_last": 5, "keep_every": 2}},
        "best": {"checkpoint": best},
        "first": {"checkpoint": best | {"keep_best": 1}},
        "highest": {"checkpoint": best | {"mode": "max", "every_steps": 5}},
        "left": {"leave_at": 7, "checkpoint": {"every_epochs": None}},
        "gone on": {"leave_at": 11, "checkpoint": {"every_steps": 2}},
    }
    return {name: _items(trained(**walk | way), "ends", "weights", "kept", "saved") for name, way in ways.items()}


def _items(result: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: result[name] for name in names}


# --- Metrics


class Reporting(Walking):
    """Numbers that are exact in any order of summation, and a window each that is not finite and that is empty."""

    def lr_scale(self, progress: float) -> float:
        return 1 - progress / 2

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, _ = batch
        slope = sum(p.sum() for p in model.parameters() if p.requires_grad)
        value = (slope - slope.detach() + 0.25 * self.step) * len(x)
        terms = {"step": torch.tensor(1.0 * self.step) * len(x)} if self.step > 5 else {}
        return Loss(value * (torch.inf if self.step == 3 else 1.0), 0 if self.step == 6 else len(x), terms)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"val/loss": 1.0 / (1 + self.step), "val/training": float(model.training), "other": self.progress}


def metrics() -> Any:
    """Returns all that trainings report, but for what the machine decides, with the events that they tell of."""
    walk = {"task": lambda: Reporting(None), "optim": WALK, "clip": {"norm": None}}
    ways: list[dict[str, Any]] = [{}, {"clip": {"norm": 1.0}, "drop_last": True, "num_epochs": 2}, {"leave_at": 6}]
    results = [trained(**walk | way) for way in ways]
    return [_items(result, "ends", "reports", "events") for result in results]


ALWAYS: dict[str, Callable[[], Any]] = {
    "step": step,
    "data order": data_order,
    "seeding": seeding,
    "checkpoint": checkpoint,
    "metrics": metrics,
    "losses": golden_data.losses,
    "data": golden_data.data,
}
