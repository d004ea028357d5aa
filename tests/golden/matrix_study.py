"""A study without training, whose trials shrink a distance by a rate that their parameters give.

The distance is all the state of a trial and its checkpoints hold it, so that a trial which goes on from the checkpoint
of another inherits it. golden_matrix.py writes another sampler and another strategy into this file.
"""

import math
from dataclasses import replace

from pydantic import BaseModel, ConfigDict

from hpo import Choice, Constraint, Float, Int, Objective, Study
from trainer.config import CheckpointConfig
from trainer.report import ENDS, Outcome

KEPT = CheckpointConfig(keep_last=1, keep_best=0)


class Train(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    num_epochs: int = 5


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    train: Train = Train()
    checkpoints: bool = False
    lr: float = 0.1
    momentum: float = 0.0
    optimizer: str = "adamw"
    hidden_size: int = 32
    num_heads: int = 4


class Shrinking:
    def __init__(self, config: Config) -> None:
        self.config = config

    def fit(self, reporter, checkpoints) -> Outcome:
        c = self.config
        loaded = checkpoints.load_latest() if c.checkpoints else None
        epoch, distance = (loaded[1].epoch, loaded[0]["distance"]) if loaded else (0, 1 + c.num_heads / c.hidden_size)
        if loaded and checkpoints.owns(loaded[1]):
            kind = reporter.report(epoch, self.metrics(distance, epoch), epoch=epoch).kind
            if kind in ENDS:
                return Outcome(ENDS[kind], epoch, epoch)
        while epoch < c.train.num_epochs:
            epoch += 1
            if c.lr > 0.7:
                return Outcome("nonfinite", epoch, epoch, error="loss is not finite")
            distance *= 1 - 0.5 * math.exp(-((math.log10(c.lr) + 2) ** 2) - abs(c.momentum - 0.6))
            kind = self.report(reporter, checkpoints, epoch, distance)
            if kind in ENDS:
                return Outcome(ENDS[kind], epoch, epoch)
        return Outcome("complete", epoch, epoch)

    def report(self, reporter, checkpoints, epoch: int, distance: float) -> str:
        metrics, saved = self.metrics(distance, epoch), None
        if self.config.checkpoints:
            saved = checkpoints.save({"distance": distance}, step=epoch, epoch=epoch, metrics=metrics)
        kind = reporter.report(epoch, metrics, epoch=epoch, checkpoint=saved).kind
        if saved:
            checkpoints.commit(saved, KEPT)
        return kind

    def metrics(self, distance: float, epoch: int) -> dict[str, float]:
        """The loss rises with every epoch in which the distance has shrunk by less than that."""
        c = self.config
        loss = distance + 0.03 * epoch + (0.05 if c.optimizer == "sgd" else 0.0)
        return {"val/loss": loss, "val/speed": 1 / c.hidden_size - 0.1 * distance, "size": float(c.hidden_size)}


STUDY = Study(
    "matrix",
    Config(),
    Shrinking,
    {
        "lr": Float(1e-4, 1.0, log=True),
        "optimizer": Choice(["adamw", "sgd"]),
        "momentum": Float(0.0, 0.9, when={"optimizer": "sgd"}),
        "num_heads": Choice([1, 2, 3, 4]),
        "hidden_size": Int(8, 64, multiple_of="num_heads"),
    },
    [Objective("val/loss")],
    sampler="random",
    strategy="none",
)
SEVERAL = replace(
    STUDY,
    objectives=[Objective("val/loss"), Objective("val/speed", "maximize")],
    constraints=[Constraint("size", upper=60.0)],
)
