"""A study whose trials train nothing: 10 reports of 3 metrics each. What remains is the platform's own cost."""

from pydantic import BaseModel, ConfigDict

from hpo import Float, Objective, Study
from trainer.config import CheckpointConfig
from trainer.report import ENDS, Outcome

REPORTS = 10
STATE = 4096  # bytes of a checkpoint's tensor


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    x: float = 0.5
    y: float = 0.1
    reports: int = REPORTS
    saves: bool = False  # a checkpoint with each report, from which the next attempt, or another trial, goes on
    bare: bool = True  # of no tensor


def metrics(x: float, y: float, step: int) -> dict[str, float]:
    """What a trial reports at `step`; the peers report the same."""
    return {"val/loss": (x - 0.3) ** 2 + 1 / step, "train/loss": y / step, "train/lr": 0.1}


def _zeros():
    import torch

    return torch.zeros(STATE, dtype=torch.uint8)


class Noop:
    def __init__(self, config: Config) -> None:
        self.config = config

    def fit(self, reporter, checkpoints) -> Outcome:
        state = {} if self.config.bare else {"weights": _zeros()}
        found = checkpoints.load_latest() if self.config.saves else None
        for step in range(found[1].step + 1 if found else 1, self.config.reports + 1):
            told = metrics(self.config.x, self.config.y, step)
            ref = checkpoints.save(state, step=step, epoch=step, metrics=told) if self.config.saves else None
            verdict = reporter.report(step, told, epoch=step, checkpoint=ref).kind
            if ref:
                checkpoints.commit(ref, CheckpointConfig())
            if verdict in ENDS:
                return Outcome(ENDS[verdict], step, step)
        return Outcome("complete", self.config.reports, self.config.reports)


STUDY = Study(
    name="noop",
    config=Config(),
    task=Noop,
    space={"x": Float(0.0, 1.0), "y": Float(1e-3, 1.0, log=True)},
    objectives=[Objective("val/loss", "minimize")],
    sampler="random",
    strategy="none",
)
