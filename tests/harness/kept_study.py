"""A study without training whose trials keep checkpoints: a curve that the parameters give."""

from pydantic import BaseModel, ConfigDict

from hpo import Float, Objective, Study
from trainer.config import CheckpointConfig
from trainer.report import ENDS, Outcome

EVERY = 3  # epochs; what lies behind the last checkpoint is reported again
KEPT = CheckpointConfig(keep_last=1, keep_best=0)


class Train(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    num_epochs: int = 9


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    train: Train = Train()
    x: float = 0.5
    y: float = 0.5


class Kept:
    def __init__(self, config: Config) -> None:
        self.config = config

    def fit(self, reporter, checkpoints) -> Outcome:
        c, found = self.config, checkpoints.load_latest()
        checkpoints.sweep()
        epoch = found[1].epoch if found else 0
        if found and checkpoints.owns(found[1]):
            kind = reporter.report(epoch, found[0], epoch=epoch).kind
            if kind in ENDS:
                return Outcome(ENDS[kind], epoch, epoch)
        while epoch < c.train.num_epochs:
            epoch += 1
            metrics = {"val/loss": (c.x - 0.3) ** 2 + c.y / epoch}
            ref = None
            if epoch % EVERY == 0:
                ref = checkpoints.save(metrics, step=epoch, epoch=epoch, metrics=metrics)
            kind = reporter.report(epoch, metrics, epoch=epoch, checkpoint=ref).kind
            if ref:
                checkpoints.commit(ref, KEPT)
            if kind in ENDS:
                return Outcome(ENDS[kind], epoch, epoch)
        return Outcome("complete", epoch, epoch)


STUDY = Study(
    "kept", Config(), Kept, {"x": Float(0.0, 1.0), "y": Float(0.0, 1.0)}, [Objective("val/loss")], sampler="random"
)
