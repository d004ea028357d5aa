"""Studies whose trials write down what they, and a process that they start, see of their environment."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from hpo import Float, Objective, Study, study
from trainer.config import TrainConfig
from trainer.data import TensorDataset
from trainer.task import Loss, Task

SEEN = "SEEN_BY_TRIALS"  # the directory in which each process leaves a file
LOOK = "import os; print(dict(os.environ), open('/proc/self/environ', 'rb').read())"


def look(process):
    seen = {"variables": dict(os.environ), "memory": repr(Path("/proc/self/environ").read_bytes())}
    seen["child"] = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True).stdout
    with tempfile.NamedTemporaryFile("w", dir=os.environ[SEEN], prefix=f"{process}-", delete=False) as file:
        json.dump(seen, file)


@study(space={"x": Float(0, 1)}, minimize="loss", num_epochs=1)
def function(trial):
    look("function")
    trial.report(1, {"loss": trial.params.x})


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    width: float = 1.0
    train: TrainConfig = TrainConfig(num_epochs=1, batch_size=4)


class Looking(Task):
    def model(self):
        look("rank" if self.config.train.parallel.ranks > 1 else "task")
        return nn.Linear(2, 1)

    def train_set(self):
        return TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1))

    def loss(self, model, batch):
        return Loss(((model(batch[0]) - batch[1]) ** 2).sum(), len(batch[0]))

    def evaluate(self, model):
        return {"loss": self.config.width}


STUDY = Study("task", Config(), ":Looking", {"width": Float(0, 1)}, [Objective("loss", "minimize")])
