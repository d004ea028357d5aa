"""A study of a few seconds that uses all of the saved state: dropout, augmentation, momentum, clipping, warmup,
accumulation, early stopping, the guard; every loss that is computed leaves a line in $TINY_LOG. Each trial hands over a
file, twice."""

import os
import tempfile
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from hpo import Choice, Float, Int, Objective, Study
from trainer.config import (
    CheckpointConfig,
    EarlyStoppingConfig,
    OptimConfig,
    PlateauConfig,
    ScheduleConfig,
    TrainConfig,
)


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    hidden_size: int = 8
    dropout: float = 0.1


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    model: Model = Model()
    pause: float = 0.02
    train: TrainConfig = TrainConfig(
        num_epochs=4,
        batch_size=12,
        micro_batch_size=5,
        optim=OptimConfig(lr=0.01),
        schedule=ScheduleConfig(name="plateau", warmup_steps=3, plateau=PlateauConfig(monitor="val/loss", patience=0)),
        early_stopping=EarlyStoppingConfig(monitor="val/loss", patience=3),
        checkpoint=CheckpointConfig(every_steps=2, keep_last=2, keep_best=1, monitor="val/loss"),
    )


def task():
    import torch
    from torch import nn

    from trainer.data import TensorDataset
    from trainer.loop import fit
    from trainer.task import Loss, Task

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=generator)
    y = (x @ torch.randn(6, 1, generator=generator)).tanh()

    class TinyTask(Task):
        def __init__(self, config):
            super().__init__(config)
            if config.train.parallel.ranks == 1:  # a fit() of one's own is one process
                self.fit = self.hand_over_and_fit

        def hand_over_and_fit(self, reporter, checkpoints):
            with tempfile.TemporaryDirectory() as directory:
                note = Path(directory, "note.txt")
                for text in ("draft", "final"):
                    note.write_text(text)
                    reporter.artifact(note, "notes/note.txt")
            return fit(self, self.config.train, reporter, checkpoints)

        def model(self):
            c = self.config.model
            return nn.Sequential(
                nn.Linear(6, c.hidden_size),
                nn.BatchNorm1d(c.hidden_size),
                nn.Dropout(c.dropout),
                nn.Linear(c.hidden_size, 1),
            )

        def train_set(self):
            return TensorDataset(x[:40], y[:40])

        def augment(self, sample, generator):
            features, target = sample
            return features + 0.05 * torch.randn(features.shape, generator=generator), target

        def loss(self, model, batch):
            if os.environ.get("TINY_FAIL"):
                raise ValueError("the task is broken")
            if log := os.environ.get("TINY_RANKS"):
                from trainer.distributed.member import this

                with open(log, "a") as file:
                    file.write(f"{this().rank} {self.config.train.optim.lr!r} {self.config.train.seed}\n")
            if log := os.environ.get("TINY_LOG"):
                with open(log, "a") as file:
                    file.write(f"{self.config.train.optim.lr!r}\n")
            time.sleep(self.config.pause)
            features, target = batch
            return Loss(((model(features) - target) ** 2).sum(), len(features))

        def evaluate(self, model):
            return {"val/loss": ((model(x[40:]) - y[40:]) ** 2).mean().item()}

    return TinyTask


def __getattr__(name):  # the driver must not import torch
    if name == "TinyTask":
        globals()[name] = task()
        return globals()[name]
    raise AttributeError(name)


STUDY = Study(
    "tiny",
    Config(),
    ":TinyTask",
    {
        "train.optim.lr": Float(1e-3, 1e-1, log=True),
        "train.optim.name": Choice(["adamw", "sgd"]),
        "train.optim.momentum": Float(0.5, 0.95, when={"train.optim.name": "sgd"}),
        "model.hidden_size": Int(4, 16, powers_of_two=True),
        "model.dropout": Float(0.0, 0.4),
    },
    [Objective("val/loss", "minimize")],
    sampler="tpe",
    strategy={"name": "asha", "min_epochs": 1, "eta": 2},
)
