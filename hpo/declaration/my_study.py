"""my_study: three classes of points, and what to search to tell them apart. Written by `hpo init`; change it freely.

    hpo run --study my_study.py --trials 5      # search; --trials 50 goes on with the same study
    hpo run --study my_study.py --name long --trials 20 -o preset=long -o train.batch_size=64
    hpo best --study my_study                   # the best trial so far; hpo compare shows them side by side

The numbers show what to change, in the order in which one usually does: 1 data, 2 model, 3 loss, 4 metrics, then
5 the space and 6 what is judged. A file that has changed is another study: give it a new name (`--name`, or 6).
"""

import math

import torch
from torch import Tensor, nn

from hpo import Choice, Float, Int, Objective, Study
from trainer.config import CheckpointConfig, Frozen, TrainConfig
from trainer.data import TensorDataset
from trainer.losses import cross_entropy
from trainer.task import Loss, Task

# The configuration: everything that a trial may change and `-o path=value` can set. Each field has a dotted path, such
# as model.hidden_size; types and defaults are checked before anything starts.


class DataConfig(Frozen):
    num_points: int = 1500
    noise: float = 0.45  # standard deviation of the angle, radians
    test: bool = False  # also measure test/..., as hpo confirm does of the best trials
    seed: int = 0  # of the points, which are the same in every trial; train.seed is that of a trial's training


class ModelConfig(Frozen):
    hidden_size: int = 32
    num_layers: int = 2
    dropout: float = 0.0


class LossConfig(Frozen):
    label_smoothing: float = 0.0


class Config(Frozen):
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    # Optimizer, schedule, precision, clipping, checkpoints ...: all of the training is configuration too. Of a trial's
    # checkpoints the one with the highest val/accuracy is kept as its best.
    train: TrainConfig = TrainConfig(num_epochs=10, checkpoint=CheckpointConfig(monitor="val/accuracy", mode="max"))


class MyTask(Task):
    """The task to train. The trainer makes one for each trial and calls the methods below; `self.config` is a
    Config."""

    # In these, as in optimizers' numbers, small trials may differ that train several at once (docs/guide/lanes.md).
    lane_fields = ("model.dropout", "loss.label_smoothing")

    # 1 DATA. Anything with a length and `data[i] -> sample` will do: a torch or Hugging Face data set, a list of pairs,
    # a Parquet file (trainer.data.TableDataset). Select by val; test is measured by `hpo confirm` alone (see 6).
    def split(self, name: str) -> tuple[Tensor, Tensor]:
        """Points [n, 2] on three bent arms and the arm of each [n]; every part is drawn the same every time."""
        data = self.config.data
        generator = torch.Generator().manual_seed(data.seed)
        classes = torch.arange(data.num_points) % 3
        radius = torch.rand(data.num_points, generator=generator)
        noise = data.noise * torch.randn(data.num_points, generator=generator)
        angle = 2 * math.pi * (classes / 3 + radius / 2) + noise
        points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
        train, val = round(0.6 * data.num_points), round(0.8 * data.num_points)
        part = {"train": slice(0, train), "val": slice(train, val), "test": slice(val, None)}[name]
        return points[part], classes[part]

    def train_set(self) -> TensorDataset:
        return TensorDataset(*self.split("train"))

    # 2 MODEL. Any nn.Module; it is built on the CPU and moved where it is trained.
    def model(self) -> nn.Module:
        model = self.config.model
        layers: list[nn.Module] = []
        for width in [2] + [model.hidden_size] * (model.num_layers - 1):
            layers += [nn.Linear(width, model.hidden_size), nn.GELU(), nn.Dropout(model.dropout)]
        return nn.Sequential(*layers, nn.Linear(model.hidden_size, 3))

    # 3 LOSS. A sum over the batch and how many samples it sums over, as every loss of trainer.losses gives it. Of your
    # own: Loss(((model(x) - y) ** 2).sum(), len(x)).
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        x, y = batch
        return cross_entropy(model(x), y, label_smoothing=self.config.loss.label_smoothing)

    # 4 METRICS. Called after each epoch, in eval mode and without gradient. Their names are yours; val/... is shown by
    # default, and what an objective names must be among them.
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        metrics = {}
        for name in ("val", "test")[: 1 + self.config.data.test]:
            x, y = (tensor.to(device) for tensor in self.split(name))
            logits = model(x).float()
            metrics[f"{name}/loss"] = nn.functional.cross_entropy(logits, y).item()
            metrics[f"{name}/accuracy"] = (logits.argmax(dim=1) == y).float().mean().item()
        return metrics


STUDY = Study(
    name="my_study",
    config=Config(),
    task=MyTask,  # commands start faster once the task is in a file of its own: task=".my_task:MyTask"
    # 5 SPACE. Path -> dimension. What is set by -o is not searched; `--tier 1` leaves out what has tier=2.
    space={
        "train.optim.name": Choice(["adamw", "sgd"]),
        "train.optim.lr": Float(1e-3, 1.0, log=True),  # every order of magnitude is as likely
        "train.optim.momentum": Float(0.0, 0.95, when={"train.optim.name": "sgd"}),  # exists only for sgd
        "train.batch_size": Int(16, 128, powers_of_two=True),
        "model.hidden_size": Int(8, 64, powers_of_two=True),
        "model.num_layers": Int(1, 3, tier=2),
        "model.dropout": Float(0.0, 0.4, tier=2),
        "loss.label_smoothing": Float(0.0, 0.2, tier=2),
    },
    # 6 WHAT IS JUDGED. By the last epoch of a trial; select="best" judges by its best one. Several objectives give a
    # Pareto front, constraints=[Constraint("time/epoch_seconds", upper=1.0)] rules trials out.
    objectives=[Objective("val/accuracy", "maximize")],
    metrics=("train/loss", "val/*", "test/*"),  # what two runs of this study must agree on
    hold_out={"data.test": True},  # set by `hpo confirm`, which trains the best trials again under other seeds
    # By default a trial stops after 4, 12, 36 ... epochs unless it is among the best third of those before it.
    # strategy="none",
    presets={
        "quick": {"train.num_epochs": 2},
        "long": {"train.num_epochs": 40, "train.schedule.name": "cosine"},
    },
)
