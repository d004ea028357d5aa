"""A study of a few seconds whose layers ranks may divide; with `frozen`, one of which 1 MB is not trained."""

from pydantic import BaseModel, ConfigDict

from hpo import Float, Objective, Study
from trainer.config import CheckpointConfig, OptimConfig, TrainConfig


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    frozen: bool = False
    train: TrainConfig = TrainConfig(
        num_epochs=2,
        batch_size=16,
        optim=OptimConfig(lr=0.01),
        checkpoint=CheckpointConfig(monitor="val/loss"),
    )


def task():
    import torch
    from torch import nn

    from trainer.data import TensorDataset
    from trainer.losses import mse
    from trainer.task import Task

    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    y = x.square().sum(1, keepdim=True).sqrt()

    class PartsTask(Task):
        def model(self):
            if self.config.frozen:
                base = nn.Linear(512, 512).requires_grad_(False)
                return nn.Sequential(nn.Linear(6, 512), nn.Tanh(), base, nn.Tanh(), nn.Linear(512, 1))
            return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))

        def parallel_plan(self, model):
            return {"0": "colwise", "2": "rowwise"}

        def train_set(self):
            return TensorDataset(x[:48], y[:48])

        def loss(self, model, batch):
            return mse(model(batch[0]), batch[1])

        def evaluate(self, model):
            return {"val/loss": (model(x[48:]) - y[48:]).square().mean().item()}

    return PartsTask


def __getattr__(name):  # the driver must not import torch
    if name == "PartsTask":
        globals()[name] = task()
        return globals()[name]
    raise AttributeError(name)


STUDY = Study(
    "parts",
    Config(),
    ":PartsTask",
    {"train.optim.lr": Float(1e-3, 1e-1, log=True)},
    [Objective("val/loss", "minimize")],
    sampler="random",
)
