"""Two objectives that pull apart, and a bound on a size: a curve per objective, without training."""

import os

from pydantic import BaseModel, ConfigDict

from hpo import Constraint, Float, Int, Objective, Study
from trainer.report import ENDS, Outcome


class Train(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    num_epochs: int = 9
    seed: int = 0


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    train: Train = Train()
    x: float = 0.5
    y: float = 0.5
    size: int = 8


class Several:
    def __init__(self, config: Config) -> None:
        self.config = config

    def fit(self, reporter, checkpoints) -> Outcome:
        c = self.config
        if os.environ.get("SEVERAL_ODD") and c.size % 2:
            return Outcome("nonfinite", 0, 0, error="loss is not finite")
        for epoch in range(1, c.train.num_epochs + 1):
            luck = 0.01 * c.train.seed
            loss, accuracy = c.x + c.y / epoch + luck, c.x**2 - c.y - luck**2
            metrics = {"val/loss": loss, "val/accuracy": accuracy, "size": 10.0 * c.size}
            if luck:
                metrics["test/loss"] = 2 * loss
            verdict = reporter.report(epoch, metrics, epoch=epoch).kind
            if verdict in ENDS:
                return Outcome(ENDS[verdict], epoch, epoch)
        return Outcome("complete", c.train.num_epochs, c.train.num_epochs)


STUDY = Study(
    "several",
    Config(),
    Several,
    {"x": Float(0.0, 1.0), "y": Float(0.0, 1.0), "size": Int(1, 16)},
    [Objective("val/loss"), Objective("val/accuracy", "maximize")],
    constraints=[Constraint("size", upper=120.0)],
    sampler="tpe",
    strategy={"name": "asha", "min_epochs": 1, "eta": 2},
)
