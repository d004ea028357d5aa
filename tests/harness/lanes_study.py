"""The tiny study for lanes of one model: what is searched is a lane's own but for `model.hidden_size`, so that there
are two kinds of trials. Every optimizer step of every lane leaves a line in $TINY_LOG."""

import os
import time

from pydantic import BaseModel, ConfigDict

from hpo import Choice, Float, Objective, Study
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
    pause: float = 0.0
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
    from trainer.lanes.lane import Lane
    from trainer.task import Loss, Task

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=generator)
    y = (x @ torch.randn(6, 1, generator=generator)).tanh()

    update = Lane.update

    def logged(lane, lr, *, solo):
        update(lane, lr, solo=solo)
        if log := os.environ.get("TINY_LOG"):
            with open(log, "a") as file:
                file.write("step\n")

    Lane.update = logged

    class LanesTask(Task):
        lane_fields = ("model.dropout",)

        def model(self):
            c = self.config.model
            return nn.Sequential(
                nn.Linear(6, c.hidden_size, bias=False),
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
            time.sleep(self.config.pause)
            features, target = batch
            return Loss(((model(features) - target) ** 2).sum(), len(features))

        def evaluate(self, model):
            return {"val/loss": ((model(x[40:]) - y[40:]) ** 2).mean().item()}

    return LanesTask


def __getattr__(name):  # the driver must not import torch
    if name == "LanesTask":
        globals()[name] = task()
        return globals()[name]
    raise AttributeError(name)


STUDY = Study(
    "lanes",
    Config(),
    ":LanesTask",
    {
        "train.optim.lr": Float(1e-3, 1e-1, log=True),
        "train.optim.weight_decay": Float(1e-4, 1e-1, log=True),
        "model.hidden_size": Choice([8, 12]),
        "model.dropout": Float(0.0, 0.4),
    },
    [Objective("val/loss", "minimize")],
    sampler="tpe",
    strategy={"name": "asha", "min_epochs": 1, "eta": 2},
)
