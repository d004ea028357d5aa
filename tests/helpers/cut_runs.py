"""Runs that are cut at any step, and a reporter that outlives its process."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import numpy as np
import torch
from torch import nn
from trainer_runs import MemoryReporter, Toy

from trainer.data import TensorDataset
from trainer.task import Loss


class Journal(MemoryReporter):
    """A reporter whose rows are on disk before it answers, so that they outlive the process."""

    path: Path

    def report(self, *args, **kwargs):
        verdict = super().report(*args, **kwargs)
        self.write()
        return verdict

    def changed(self, *args, **kwargs):
        needed = super().changed(*args, **kwargs)
        self.write()
        return needed

    def write(self) -> None:
        partial = self.path.with_suffix(".tmp")
        partial.write_bytes(pickle.dumps((self.values, self.epochs, self.committed, self.fence)))
        partial.rename(self.path)

    def read(self) -> None:
        if self.path.exists():
            self.values, self.epochs, self.committed, self.fence = pickle.loads(self.path.read_bytes())


STEPS = 8  # two epochs of four windows, the last of each ragged: 44 samples in batches of 12, micro-batches of 5


class ToyWithGlobalDraws(Toy):
    """Draws from torch's, numpy's and python's global generators wherever a task may; reads samples one by one."""

    class Samples:
        def __init__(self, data: TensorDataset) -> None:
            self.data = data

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index: int):
            x, y = self.data[index]
            return x * (1 + 0.1 * np.random.rand()) + 0.1 * random.random() + 0.1 * torch.rand(6), y

    def train_set(self):
        return self.Samples(super().train_set())

    def loss(self, model, batch):
        x, y = batch
        return super().loss(model, (x * float(np.random.beta(8, 2)) * (1 + 0.1 * random.random()), y))


class ToyInPhases(Toy):
    """A loss whose weight changes over the run."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return Loss(loss.sum * (1 + self.progress), loss.count)


class ToyThatJumps(Toy):
    """One window of the second epoch has a loss out of all proportion."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return Loss(loss.sum * 1e4, loss.count) if self.progress == 5 / STEPS else loss


class ToyOfLittleMemory(Toy):
    """From the third step on, memory holds two samples at a time."""

    def loss(self, model, batch):
        if self.progress >= 2 / STEPS and len(batch[1]) > 2:
            raise torch.OutOfMemoryError("what a GPU would say")
        return super().loss(model, batch)


class ToyOfImages(Toy):
    """A convolution whose weights do not lie in the order of their indices."""

    def model(self):
        layers = [nn.Unflatten(1, (3, 1, 2)), nn.Conv2d(3, 8, (1, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)]
        self.net = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        assert not self.net[1].weight.is_contiguous()
        return self.net


class Centred(nn.Module):
    """Subtracts running means that its state_dict leaves out: one that is there from the start, and one that the first
    pass makes. A table of a larger model's stays as it is."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6), persistent=False)
        self.register_buffer("square", None, persistent=False)
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            square = x.detach().square().mean(0)
            self.square = square if self.square is None else 0.9 * self.square + 0.1 * square
        return (x - self.mean) / (1 + (self.mean * 0 if self.square is None else self.square)) + 0 * self.table


class Scheduled(nn.Module):
    """A factor that falls with the passes, which the module saves itself."""

    def __init__(self):
        super().__init__()
        self.passes, self.recent = 0, (0, 0)

    def get_extra_state(self):
        return {"passes": self.passes, "recent": self.recent, "by_number": {1: self.passes}}

    def set_extra_state(self, state):
        assert isinstance(state["recent"], tuple) and state["by_number"] == {1: state["passes"]}
        self.passes, self.recent = state["passes"], state["recent"]

    def forward(self, x):
        if self.training:
            self.passes, self.recent = self.passes + 1, (self.recent[1], self.passes)
        return x / (1 + 0.1 * self.passes + 0.01 * sum(self.recent))


def toy_with(module: type[nn.Module]) -> type[Toy]:
    class With(Toy):
        def model(self):
            self.net = nn.Sequential(module(), *super().model())
            return self.net

    return With


ROLLBACK = {"enabled": True, "threshold": 20.0, "window": 8, "min_history": 2, "cooldown": 2}


VARIANTS = {
    "default": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "loss_scale": {"init": 2.0**24, "growth_interval": 2}},
    "tf32": {"precision": "tf32"},
    "compiled": {"compile": True},
    "ema": {"average": {"name": "ema", "decay": 0.8}},
    "swa": {"average": {"name": "swa", "start": 0.2}},
    "rollback": {"task": ToyThatJumps, "rollback": ROLLBACK, "checkpoint": {"every_steps": 2, "keep_last": 1}},
    "little memory": {"task": ToyOfLittleMemory},
    "sgd": {"optim": {"name": "sgd", "nesterov": True}, "schedule": {"name": "one_cycle"}},
    "cycled momentum": {"schedule": {"name": "one_cycle", "one_cycle": {"momentum": [0.5, 0.95]}}},
    "cosine": {"schedule": {"name": "cosine", "warmup_steps": 3, "min_lr": 1e-5}, "clip": {"norm": 0.1}},
    "gradients": {
        "gradients": {"centralize": True, "noise": 0.01, "noise_scale": True},
        "clip": {"adaptive": 0.1},
        "schedule": {"name": "wsd", "warmup": "cosine", "warmup_steps": 2, "scale_lr": "sqrt"},
    },
    "channels last": {"task": ToyOfImages, "optim": {"name": "sgd"}},
    "channels last, adamw": {"task": ToyOfImages},
    "activations": {"activations": {"checkpoint": "selective"}},
    "penalty": {"gradients": {"penalty": 1.0, "penalty_of": "loss"}},
    "phases": {"task": ToyInPhases},
    "draws": {"task": ToyWithGlobalDraws},
    "plateau": {"schedule": {"name": "plateau", "plateau": {"patience": 0, "threshold": 0.5}}, "num_epochs": 3},
    "lookahead": {"optim": {"wrap": "lookahead", "lookahead": {"k": 4}}},
    "sam": {"optim": {"name": "sgd", "wrap": "sam", "layer_decay": 0.7}},
    "state in float64": {"optim": {"name": "own_optimizers:Double"}},
    "a mask as state": {"optim": {"name": "own_optimizers:Signs"}},
    "counters, texts, tuples": {"optim": {"name": "own_optimizers:Counts"}},
    "counters in groups": {"optim": {"name": "own_optimizers:Groups"}},
    "counters in groups, rolled back": {
        "task": ToyThatJumps,
        "rollback": ROLLBACK,
        "checkpoint": {"every_steps": 2, "keep_last": 1},
        "optim": {"name": "own_optimizers:Groups"},
    },
    "buffers left out": {"task": toy_with(Centred)},
    "buffers left out, averaged": {"task": toy_with(Centred), "average": {"name": "ema", "decay": 0.8}},
    "extra state": {"task": toy_with(Scheduled)},
    "extra state, averaged": {"task": toy_with(Scheduled), "average": {"name": "ema", "decay": 0.8}},
    "schedule_free": {"optim": {"name": "schedule_free"}, "schedule": {"warmup_steps": 3}},
    "prodigy": {"optim": {"name": "prodigy", "d0": 1e-3}},
    "sophia": {"optim": {"name": "sophia", "update_every": 2}},
    "ranger": {"optim": {"name": "ranger", "lookahead": {"k": 4}}},
    "muon": {"optim": {"name": "muon"}},
    "soap": {"optim": {"name": "soap", "update_every": 2}},
}
