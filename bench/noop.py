"""A study whose trials train nothing: 10 reports of 3 metrics each. What remains is the platform's own cost."""

from pydantic import BaseModel, ConfigDict

from hpo import Float, Objective, Study
from trainer.report import ENDS, Outcome

REPORTS = 10


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    x: float = 0.5
    y: float = 0.1


def metrics(x: float, y: float, step: int) -> dict[str, float]:
    """What a trial reports at `step`; the peers report the same."""
    return {"val/loss": (x - 0.3) ** 2 + 1 / step, "train/loss": y / step, "train/lr": 0.1}


class Noop:
    def __init__(self, config: Config) -> None:
        self.config = config

    def fit(self, reporter, checkpoints) -> Outcome:
        for step in range(1, REPORTS + 1):
            verdict = reporter.report(step, metrics(self.config.x, self.config.y, step), epoch=step).kind
            if verdict in ENDS:
                return Outcome(ENDS[verdict], step, step)
        return Outcome("complete", REPORTS, REPORTS)


STUDY = Study(
    name="noop",
    config=Config(),
    task=Noop,
    space={"x": Float(0.0, 1.0), "y": Float(1e-3, 1.0, log=True)},
    objectives=[Objective("val/loss", "minimize")],
    sampler="random",
    strategy="none",
)
