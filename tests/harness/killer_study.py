"""A study in which some configurations kill the process that trains them."""

import os
import signal

from pydantic import BaseModel, ConfigDict

from hpo import Float, Objective, Study
from trainer.report import Outcome


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    lr: float = 0.1


class Killer:
    def __init__(self, config: Config) -> None:
        self.config = config

    def fit(self, reporter, checkpoints) -> Outcome:
        if self.config.lr < float(os.environ["KILLS_BELOW"]):
            os.kill(os.getpid(), signal.SIGKILL)
        reporter.report(1, {"val/loss": self.config.lr}, epoch=1)
        return Outcome("complete", 1, 1)


STUDY = Study("killer", Config(), Killer, {"lr": Float(1e-4, 1.0, log=True)}, [Objective("val/loss", "minimize")])
