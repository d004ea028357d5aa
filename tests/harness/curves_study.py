"""A study without training: each trial reports a curve that its parameters give, some of them not finite."""

import math

from pydantic import BaseModel, ConfigDict

from hpo import Choice, Float, Int, Objective, Study
from trainer.report import ENDS, Outcome


class Train(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    num_epochs: int = 9


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    train: Train = Train()
    lr: float = 0.1
    momentum: float = 0.0
    optimizer: str = "adamw"
    hidden_size: int = 32
    num_heads: int = 4


class Curves:
    def __init__(self, config: Config) -> None:
        self.config = config

    def fit(self, reporter, checkpoints) -> Outcome:
        c = self.config
        floor = (math.log10(c.lr) + 2) ** 2 + c.momentum + 8 / c.hidden_size
        for epoch in range(1, c.train.num_epochs + 1):
            if c.lr > 0.7:
                return Outcome("nonfinite", epoch, epoch, error="loss is not finite")
            loss = floor + c.num_heads / epoch
            verdict = reporter.report(epoch, {"val/loss": loss, "time/epoch": 1.0}, epoch=epoch).kind
            if verdict in ENDS:
                return Outcome(ENDS[verdict], epoch, epoch)
        return Outcome("complete", c.train.num_epochs, c.train.num_epochs)


STUDY = Study(
    "curves",
    Config(),
    Curves,
    {
        "lr": Float(1e-4, 1.0, log=True),
        "optimizer": Choice(["adamw", "sgd"]),
        "momentum": Float(0.0, 0.9, when={"optimizer": "sgd"}),
        "num_heads": Choice([1, 2, 3, 4]),
        "hidden_size": Int(8, 64, multiple_of="num_heads"),
    },
    [Objective("val/loss", "minimize")],
    strategy={"name": "asha", "min_epochs": 1},
)
