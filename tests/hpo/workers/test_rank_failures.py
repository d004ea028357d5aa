"""A trial of two ranks that fails on one of them ends as the same failure of one process would."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from sqlalchemy import select
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.ledger import Ledger
from hpo.ledger.database.tables import trials
from hpo.storage.home import Home

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("ranks")]

STUDY = """
import errno

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from hpo import Choice, Objective, Study
from trainer.config import ParallelConfig, TrainConfig
from trainer.data import TensorDataset
from trainer.errors import ConfigError
from trainer.distributed.member import this
from trainer.task import Loss, Task


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    fate: str = "well"
    train: TrainConfig = TrainConfig(num_epochs=1, batch_size=2, parallel=ParallelConfig(data=2))


class Fated(Task):
    def model(self):
        if self.config.fate == "configuration":
            raise ConfigError("model.width is 0: raise it.")
        return nn.Linear(2, 1)

    def train_set(self):
        return TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1))

    def loss(self, model, batch):
        if this().rank == 1:
            self.meet(self.config.fate)
        return Loss(((model(batch[0]) - batch[1]) ** 2).sum(), len(batch[0]))

    def meet(self, fate):
        if fate == "bug":
            raise ZeroDivisionError("a bug of the user's")
        if fate == "memory":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        if fate == "disk":
            raise OSError(errno.ENOSPC, "No space left on device")
        if fate == "rumour":
            raise RuntimeError("this build has no NCCL, and gloo is too old")
        if fate == "edit":
            with open(__file__, "a") as file:
                file.write("version = 2\\n")

    def evaluate(self, model):
        return {"val/loss": 0.5}


FATES = ["bug", "configuration", "memory", "rumour"]
STUDY = Study(
    "ranks",
    Config(),
    Fated,
    {"fate": Choice([*FATES, "well", "disk", "edit"])},
    [Objective("val/loss")],
    enqueue=[{"fate": fate} for fate in FATES],
)
"""
# fate -> the trial's state, its outcome, a part of its error
RULES = {
    "bug": ("failed", "user_error", "in meet: ZeroDivisionError: a bug of the user's"),
    "configuration": ("failed", "bad_config", "model.width is 0: raise it."),
    "memory": ("infeasible", "out_of_memory", "rank 1: out of memory: DefaultCPUAllocator"),
    "rumour": ("failed", "user_error", "rank 1: RuntimeError: this build has no NCCL"),  # as if a rank were lost
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine" / "ranks.py"
    path.write_text(STUDY)
    return path


def run(file: Path, home: Home, *arguments: str, code: int):
    given = ["run", "--study", str(file), "--workers", "1", *arguments, "--home", str(home.root)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == code, (result.output, result.stderr)
    return result


def found(home: Home) -> list:
    with Ledger(home.storage).read() as connection:
        return list(connection.execute(select(trials).order_by(trials.c.number)).mappings())


def test_every_kind_has_its_state_and_the_traceback_of_its_rank(tmp_path, file):
    home = Home(tmp_path / "home")
    run(file, home, "--trials", str(len(RULES)), code=5)
    for row, (fate, (state, outcome, error)) in zip(found(home), RULES.items(), strict=True):
        assert (row["state"], row["outcome"]) == (state, outcome), (fate, row["error"])
        assert error in (row["error"] or ""), fate
    for place in (0, 3):
        bug = found(home)[place]["traceback"]
        assert "in meet" in bug and "ranks.py" in bug and "Failure" not in bug


def test_a_full_disk_on_one_rank_fails_no_trial(tmp_path, file):
    home = Home(tmp_path / "home")
    result = run(file, home, "--trials", "1", "-o", "fate=disk", code=1)
    assert "free some space" in result.stderr
    [row] = found(home)
    assert (row["state"], row["traceback"]) == ("waiting", None), json.dumps(dict(row), default=str)


def test_code_edited_between_two_trials_trains_none_as_the_studys(tmp_path, file):
    """The worker has loaded it before; each rank loads it anew."""
    home, first = Home(tmp_path / "home"), tmp_path / "first.yaml"
    first.write_text("fate: edit\n")
    result = run(file, home, "--trials", "2", "--enqueue", str(first), code=1)
    assert re.search(r"workers cannot go on .*this worker cannot train study 'ranks' .*code", result.stderr), (
        result.stderr
    )
    assert [(row["state"], row["outcome"]) for row in found(home)][:2] == [
        ("complete", "complete"),
        ("waiting", "preempted"),
    ]
