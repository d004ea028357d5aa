"""Tiny trainings, each with a feature on that a training uses only where it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from golden_task import BASE, SAMPLES, SGD, Recorder, Rows, Tiny, filled, labelled, trail, trained
from torch import nn

from trainer.checkpoint.store import CheckpointStore
from trainer.config import Frozen, InitConfig, TrainConfig
from trainer.config.init import Scheme
from trainer.cross_validation import fit_folds
from trainer.lanes.group import Group
from trainer.model.init import initialise
from trainer.task import Loss


def _each(ways: Mapping[str, Mapping[str, Any]], item: str = "") -> dict[str, Any]:
    """Returns how the training of each way went, with an item of the state that its newest checkpoint holds."""
    results = {name: trained(**way) for name, way in ways.items()}
    return {
        name: trail(result) | ({"item": result["saved"]["state"][item]} if item else {})
        for name, result in results.items()
    }


def gradients() -> Any:
    """Returns trainings whose gradients are clipped, normalised, centralised, made noisy, penalised and measured."""
    ways: dict[str, Any] = {
        "value": {"clip": {"norm": None, "value": 0.05}},
        "per parameter": {"clip": {"per_parameter": 0.1}},
        "adaptive": {"clip": {"norm": None, "adaptive": 0.05, "adaptive_exclude": ["3.*"]}},
        "global": {"gradients": {"normalize": "global"}, "clip": {"norm": None}},
        "parameter": {"gradients": {"normalize": "parameter", "centralize": True}, "clip": {"norm": 0.7}},
        "noise": {"gradients": {"noise": 0.1, "noise_decay": 0.4}},
        "output": {"gradients": {"penalty": 0.5}},
        "loss": {"gradients": {"penalty": 0.5, "penalty_of": "loss", "penalty_norm": 0.0}},
    }
    scale = trained(gradients={"noise_scale": True}, micro_batch_size=3)
    return _each(ways), [row["train/noise_scale"] for *_, row in scale["reports"]]


def averaging() -> Any:
    """Returns trainings that evaluate and save an average of their weights."""
    ways = {
        "ema": {"average": {"name": "ema", "decay": 0.8}, "checkpoint": {}},
        "slow": {"average": {"name": "ema"}, "checkpoint": {}},
        "swa": {"average": {"name": "swa", "start": 0.25, "every_steps": 2}, "checkpoint": {}},
    }
    return _each({name: way | {"task": lambda: Normed(None)} for name, way in ways.items()}, "average")


class Normed(Tiny):
    """With batch norm, whose statistics are no parameters."""

    def layers(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def initialization() -> Any:
    """Returns the weights of each scheme, and trainings that begin with some."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
            self.down, self.up = nn.Linear(4, 6), nn.Linear(6, 9)
            self.filter, self.back = nn.Conv2d(3, 4, 2), nn.ConvTranspose1d(4, 3, 2)

    ways = [{"name": name} for name in get_args(Scheme)]
    ways += [{"name": "orthogonal", "gain": 1.5}, {"name": "trunc_normal", "std": 0.1, "zero_last": True}]
    models = [initialise(filled(Layers()), InitConfig.model_validate(way), seed) for way in ways for seed in (0, 9)]
    trainings = {name: {"init": {"name": name, "zero_last": True}} for name in ("default", "kaiming_uniform")}
    return [model.state_dict() for model in models], _each(trainings)


def slow_weights() -> Any:
    """Returns trainings within Lookahead."""
    ways = ({}, {"k": 2, "alpha": 0.3})
    each = {f"{way}": {"optim": SGD | {"wrap": "lookahead", "lookahead": way}, "checkpoint": {}} for way in ways}
    return _each(each, "lookahead")


def sam() -> Any:
    """Returns trainings by sharpness-aware minimisation."""
    ways = ({}, {"rho": 0.2}, {"rho": 0.5, "adaptive": True})
    return _each({f"{way}": {"task": lambda: Normed(None), "optim": SGD | {"wrap": "sam", "sam": way}} for way in ways})


def precision() -> Any:
    """Returns trainings in half precision, without oneDNN, whose kernels for it not every processor has."""
    scales = ({}, {"init": 2.0**20, "growth_interval": 3}, {"init": 64.0, "dynamic": False})
    ways: dict[str, Any] = {"bf16": {"precision": "bf16"}}
    ways |= {f"fp16 {scale}": {"precision": "fp16", "loss_scale": scale} for scale in scales}
    [enabled, *_] = torch.backends.mkldnn.set_flags(False)
    try:
        return _each({name: way | {"checkpoint": {}} for name, way in ways.items()}, "loss_scale")
    finally:
        torch.backends.mkldnn.set_flags(enabled)


class Levelling(Tiny):
    """A metric that improves for a while."""

    values = (1.0, 0.5, 0.45, 0.47, 0.46, 0.2, 0.3, 0.9)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"val/loss": self.values[self.step // 4 - 1]}


def early_stopping() -> Any:
    """Returns trainings that end before their time."""
    monitor = {"monitor": "val/loss"}
    ways = (
        {"patience": 2},
        {"patience": 2, "min_delta": 0.1},
        {"patience": 2, "mode": "max"},
        {"divergence": 0.8, "patience": 5},
        {"divergence": 0.46, "mode": "max"},
    )
    each = {f"{way}": {"early_stopping": monitor | way, "checkpoint": {}} for way in ways}
    each = {name: way | {"task": lambda: Levelling(None), "num_epochs": 8} for name, way in each.items()}
    courses = _each(each, "early_stopping")
    for course in courses.values():
        course["item"]["diverged"] = bool(course["item"]["diverged"])  # in words
    return courses


class Jumping(Tiny):
    """Two windows have a loss far above the others'."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.sum * (100.0 if self.step in (9, 13) else 1.0), loss.count)


def rollback() -> Any:
    """Returns trainings that go back to a checkpoint when their loss jumps."""
    ways: tuple[dict[str, Any], ...] = (
        {"min_history": 4, "cooldown": 3},
        {"min_history": 4, "window": 5, "threshold": 4.0, "lr_factor": 0.1, "cooldown": 9},
        {"min_history": 4, "max_rollbacks": 1},
        {"min_history": 12},
    )
    rolled = {f"{way}": {"rollback": way | {"enabled": True}, "checkpoint": {"every_steps": 3}} for way in ways}
    rolled = {name: way | {"task": lambda: Jumping(None), "num_epochs": 5} for name, way in rolled.items()}
    return _each(rolled, "spikes")


def batch_growth() -> Any:
    """Returns trainings in batches that grow."""
    ways = ({"epochs": [1]}, {"epochs": [1, 3], "factor": 1.5}, {"epochs": [2], "factor": 10.0})
    return _each({f"{way}": {"batch_growth": way, "num_epochs": 4} for way in ways})


# --- Folds


class Whole(Frozen):
    """The configuration of a study, as its task has it."""

    train: TrainConfig


class Folded(Tiny):
    """Leaves out another third of the samples in each fold, and draws its weights."""

    fold = 0

    def in_fold(self, fold: int, folds: int) -> Folded:
        part = Folded(self.config)
        part.fold = fold
        return part

    def model(self) -> nn.Module:
        self.net = self.layers()
        return self.net

    def train_set(self) -> Rows:
        x, y = labelled(SAMPLES, seed=1)
        rows = [row for row in range(SAMPLES) if row % 3 != self.fold]
        return Rows(x[rows], y[rows])


def folds() -> Any:
    """Returns trainings that repeat by folds and by seeds, some of which left in the middle and went on."""
    ways: dict[str, Any] = {
        "folds": {"folds": 3},
        "best": {"folds": 3, "checkpoint": {"monitor": "val/loss"}, "leave_at": 9},
        "seeds": {"seeds": 2},
        "three": {"seeds": 3, "checkpoint": {}, "leave_at": 8, "num_epochs": 2},
    }
    results = {}
    for name, way in ways.items():
        config = TrainConfig.model_validate(BASE | {key: value for key, value in way.items() if key != "leave_at"})
        result = trained(lambda config=config: Folded(Whole(train=config)), by=fit_folds, **way)
        results[name] = trail(result) | {"kept": result["kept"]}
    return results


# --- Lanes


class Dropping(Tiny):
    """With dropout, whose masks are a lane's own."""

    def layers(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


# With all that they read set, so that a changed default of theirs is a change of theirs alone.
ADAM: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.05}
TOGETHER: tuple[dict[str, Any], ...] = (
    {"name": "sgd", "lr": 0.1, "momentum": 0.8, "nesterov": False, "weight_decay": 0.01},
    {"name": "sgd", "lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    ADAM | {"name": "adam"},
    ADAM | {"name": "adamw"},
    {"name": "lion", "lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.05},
)


def lanes() -> Any:
    """Returns how two trials train together, with each optimizer whose steps are taken together and with one of their
    own; and how one goes on alone."""
    base = {"lanes": 2, "num_epochs": 2}
    ways: list[tuple[dict[str, Any], ...]] = [
        ({"optim": optim}, {"optim": optim | {"lr": 0.05}, "seed": 4}) for optim in TOGETHER
    ]
    ways += [({"clip": {"norm": 0.1}}, {"num_epochs": 3, "optim": SGD | {"lr": 0.1}})]
    ways += [({"gradients": {"centralize": True}}, {"gradients": {"centralize": True}, "seed": 1})]
    return [_together([TrainConfig.model_validate(BASE | base | way) for way in pair]) for pair in ways]


def _together(configs: list[TrainConfig]) -> Any:
    tasks = [Dropping(Whole(train=config)) for config in configs]
    recorders = [Recorder(None) for _ in configs]
    places, ends = {}, {}
    with TemporaryDirectory(prefix="hpo-golden-") as directory, Group(configs[0], _commit) as group:
        for place, parts in enumerate(zip(tasks, configs, recorders, strict=True)):
            lane = group.admit(*parts, CheckpointStore(Path(directory, str(place)), 1))
            places[lane] = place
        while group.lanes:
            for lane, outcome in group.advance():
                ends[places[lane]] = [outcome.kind, outcome.step, outcome.epoch]
    return [
        trail({"ends": ends[place], "reports": recorder.reports, "weights": task.net.state_dict()})
        for place, (task, recorder) in enumerate(zip(tasks, recorders, strict=True))
    ]


def _commit(reports: Any, wait: bool) -> list[Any]:
    return [reporter.report(report) for reporter, report in reports]


FEATURES: dict[str, Callable[[], Any]] = {
    "gradients": gradients,
    "averaging": averaging,
    "initialization": initialization,
    "lookahead": slow_weights,
    "sam": sam,
    "precision": precision,
    "early stopping": early_stopping,
    "rollback": rollback,
    "batch growth": batch_growth,
    "folds": folds,
    "lanes": lanes,
}
