"""The process of a worker: put back after each trial, of its own for each study, and replaced where it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from sqlalchemy import select
from study_runs import drive, query

from hpo.analysis.results.progress import Progress
from hpo.clock import SystemClock
from hpo.ledger import Ledger
from hpo.ledger.database import tables
from hpo.storage.home import Home
from hpo.workers.executors.local import Local
from hpo.workers.process import WorkerProcess

TASK = """
import numpy, torch
from hpo import Choice, Objective, Study
from trainer.config import Frozen, TrainConfig
from trainer.data import TensorDataset
from trainer.task import Loss, Task

class Config(Frozen):
    odd: int = 0
    train: TrainConfig = TrainConfig(num_epochs=1, batch_size=16)

class Line(Task):
    lane_fields = ("odd",)
    def model(self):
        if self.config.odd:
            CHANGE
        return torch.nn.Linear(2, 1)
    def train_set(self):
        x = torch.randn(32, 2, dtype=torch.float32)
        return TensorDataset(x, x.sum(1, keepdim=True))
    def loss(self, model, batch):
        x, y = batch
        return Loss(((model(x.to(model.weight.dtype)) - y) ** 2).sum(), len(x))
    def evaluate(self, model):
        return {"loss": float(model.weight.sum() ** 2), "double": float(model.weight.dtype == torch.float64)}

STUDY = Study("line", Config(), Line, {"odd": Choice([1, 0])}, [Objective("loss")], strategy="none", sampler="grid")
"""
SPENDS = """
import time, torch, hpo
@hpo.study(space={"x": hpo.Float(0, 1)}, minimize="loss", strategy="none", sampler="random")
def spends(trial):
    torch.set_num_interop_threads(1 + torch.get_num_interop_threads())  # which raises where it was set before
    time.sleep(PAUSE)
    return float(torch.get_num_interop_threads())
"""


def written(tmp_path: Path, text: str) -> str:
    (tmp_path / "study.py").write_text(text)
    return str(tmp_path / "study.py")


def test_the_default_dtype_of_a_trial_is_its_own(tmp_path):
    study = written(tmp_path, TASK.replace("CHANGE", "torch.set_default_dtype(torch.float64)"))
    home = Home(tmp_path / "home")
    drive(home, trials=2, reference=study)
    of = tables.reports.c
    doubles = query(home, select(of.trial_id, of.value).where(of.key == "double").order_by(of.trial_id))
    assert [value for _, value in doubles] == [1.0, 0.0]
    assert torch.get_default_dtype() == torch.float32


def test_a_lane_that_sets_the_process_otherwise_than_others_is_told(tmp_path):
    """Each is made apart from the other, and neither may train under the other's settings."""
    study = written(tmp_path, TASK.replace("CHANGE", "numpy.seterr(all='raise')"))
    home = Home(tmp_path / "home")
    drive(home, trials=2, reference=study, overrides={"train.lanes": 2})
    of = tables.trials.c
    (first, _), (second, said) = query(home, select(of.state, of.error).order_by(of.number))
    assert (first, second) == ("complete", "failed")
    assert "train.lanes: this trial sets numpy's error states otherwise than the lanes beside it" in said


def test_what_a_studys_file_sets_is_not_seen_by_another_study(tmp_path):
    ledger = Ledger(Home(tmp_path / "home").create().storage)
    finders = [*sys.meta_path]
    process = WorkerProcess(ledger, shared=False)
    seen = []
    for study, dtype in ((1, torch.float64), (2, None), (1, None), (2, None)):
        with process.loading(study):
            if dtype is not None:
                torch.set_default_dtype(dtype)
        seen.append(torch.get_default_dtype())
    process.close()
    torch.set_default_dtype(torch.float32)
    ledger.close()
    assert seen == [torch.float64, torch.float32] * 2
    assert sys.meta_path == finders


@pytest.mark.usefixtures("process")
def test_a_worker_that_cannot_be_put_back_is_replaced_and_says_so(tmp_path):
    """More often than workers may fail in a row, each within its first seconds."""
    home = Home(tmp_path / "home")
    study = written(tmp_path, SPENDS.replace("PAUSE", "0"))
    _, status, state, _ = drive(home, Local(1), trials=6, reference=f"{study}:spends")
    assert (state, status.trials["complete"]) == ("complete", 6)
    assert len({tuple(values) for (values,) in query(home, select(tables.trials.c["values"]))}) == 1
    assert len(query(home, select(tables.workers.c.id))) in (6, 7), "one for each trial, and one that finds none left"
    ledger = Ledger(home.storage)
    said = [*Progress(ledger, "spends", SystemClock()).remarks()]
    ledger.close()
    assert len(said) == 1
    assert said[0].startswith("trial 0 changed torch's interop threads, which a process cannot undo: a fresh worker")


@pytest.mark.usefixtures("process")
def test_a_worker_that_was_started_by_hand_begins_afresh(tmp_path):
    study, home = written(tmp_path, SPENDS.replace("PAUSE", "0.3")), Home(tmp_path / "home")
    environ = os.environ | {"HPO_HOME": str(home.root), "PYTHONUNBUFFERED": "1"}

    def start(*arguments: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen([sys.executable, "-m", "hpo", *arguments], text=True, env=environ, **pipes)

    driver = start("run", "--study", f"{study}:spends", "--trials", "12", "--window", "12", "--workers", "1")
    while not (home.root / "checkpoints" / "spends" / "study.uid").exists():
        assert driver.poll() is None
        time.sleep(0.02)
    worker = start("worker", "--storage", home.storage, "--study", "spends")
    said, _ = worker.communicate(timeout=200)
    output, _ = driver.communicate(timeout=200)
    assert (driver.returncode, worker.returncode) == (0, 0), (output, said)
    assert "begins afresh after 1 trial" in said
