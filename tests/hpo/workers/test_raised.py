"""Whatever a trial raises ends that trial, with its place; a user's Ctrl-C alone goes on through it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from study_runs import drive, query

from hpo.ledger.database.tables import trials
from hpo.storage.home import Home
from hpo.workers.executors.local import Local
from trainer.errors import Interrupted, is_stop

FATES = {
    "asyncio.CancelledError('timed out')": "raised.py:10, in raised: CancelledError: timed out",
    "GeneratorExit": "raised.py:10, in raised: GeneratorExit",
    "KeyboardInterrupt('own')": "raised.py:10, in raised: KeyboardInterrupt: own",
    "Own('odd')": "raised.py:10, in raised: Own: odd",
    "tokenizers.NormalizedString('a').for_each(lambda c: 1 / 0)": "PanicException: ",
    "sys.exit('no data')": "raised.py:10, in raised: SystemExit: no data",
    "sys.exit(1)": "raised.py:10, in raised: SystemExit: 1",
    "sys.exit()": "raised.py:10, in raised: sys.exit() ended the training after epoch 1 of 2: let it train to its end",
}
FUNCTION = """
import asyncio, sys, hpo, tokenizers
FATES = {fates}
class Own(BaseException): pass
@hpo.study(space={{"fate": hpo.Choice([*dict.fromkeys([*FATES, "-"])])}}, minimize="loss", num_epochs=2,
           strategy="none", sampler="random",
           enqueue=[{{"fate": fate}} for fate in FATES])
def raised(trial):
    trial.report(1, {{"loss": 1.0}})
    if trial.params.fate: raise eval(trial.params.fate)
    trial.report(2, {{"loss": 1.0}})
"""
LEFT = """
import sys
from pydantic import BaseModel, ConfigDict
import hpo
from trainer.report import Outcome

@hpo.study(space={"epochs": hpo.Int(0, 2), "code": hpo.Choice([None, 0])}, minimize="loss", num_epochs=2,
           strategy="none", sampler="random", enqueue=[{"epochs": 2, "code": None}, {"epochs": 2, "code": 0}])
def leaves(trial):
    for epoch in range(1, trial.params.epochs + 1):
        trial.report(epoch, {"loss": 1.0})
    sys.exit(trial.params.code)

@hpo.study(space={"x": hpo.Float(0, 1)}, minimize="loss", strategy="none", sampler="random")
def of_unknown_length(trial):
    trial.report(1, {"loss": 1.0})
    sys.exit(0)

class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    epochs: int = 2

class Loop:
    def __init__(self, config):
        self.config = config
    def fit(self, reporter, checkpoints):
        for epoch in range(1, self.config.epochs + 1):
            reporter.report(epoch, {"loss": 1.0}, epoch=epoch)
        sys.exit()

OWN = hpo.Study("own", Config(), Loop, {"epochs": hpo.Int(0, 2)}, [hpo.Objective("loss")], strategy="none",
                sampler="grid")
"""
TASK = """
import asyncio
import torch
from hpo import Choice, Objective, Study
from trainer.config import Frozen, TrainConfig
from trainer.task import Loss, Task

class Config(Frozen):
    where: str = "nowhere"
    train: TrainConfig = TrainConfig(num_epochs=1, batch_size=8)

class Data(list):
    where = ""
    def __getitem__(self, index):
        raised("data", self.where)
        return super().__getitem__(index)

def raised(here, where):
    if here == where:
        raise asyncio.CancelledError("late")

class Cancelled(Task):
    lane_fields = ("where",)
    def model(self):
        raised("model", self.config.where)
        return torch.nn.Linear(2, 1)
    def train_set(self):
        data = Data([(torch.ones(2), torch.ones(1))] * 16)
        data.where = self.config.where
        return data
    def loss(self, model, batch):
        raised("loss", self.config.where)
        x, y = batch
        return Loss(((model(x) - y) ** 2).sum(), len(x))
    def evaluate(self, model):
        raised("evaluate", self.config.where)
        return {"loss": 0.0}

WHERE = ["nowhere", "model", "loss", "evaluate", "data"]
STUDY = Study("cancelled", Config(), Cancelled, {"where": Choice(WHERE)}, [Objective("loss")], strategy="none",
              sampler="grid", enqueue=[{"where": where} for where in WHERE])
"""


def written(tmp_path: Path, name: str, text: str) -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def ended(home: Home) -> list[tuple[str, str]]:
    return [(state, error or "") for state, error in query(home, select(trials.c.state, trials.c.error))]


@pytest.mark.parametrize("executor", ["inline", pytest.param("local", marks=pytest.mark.process)])
def test_whatever_a_function_raises_fails_its_trial_alone(tmp_path, executor, monkeypatch):
    """As under `hpo run`, where SIGINT has a handler of the driver's, and in a worker, which has its own."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    fates = [fate for one in FATES for fate in (one, "")]
    study = written(tmp_path, "raised.py", FUNCTION.format(fates=fates))
    try:
        home = Home(tmp_path / "home")
        drive(home, Local(1) if executor == "local" else None, trials=len(fates), reference=study)
    finally:
        signal.signal(signal.SIGINT, before)
    for fate, (state, error) in zip(fates, ended(home), strict=True):
        assert (state, FATES.get(fate, "") in error) == ("failed" if fate else "complete", True), (fate, error)
        assert fate or not error


def test_a_users_ctrl_c_is_no_failure_of_a_trial(tmp_path):
    """Python's own handler raises it where no driver has taken its place, and a driver's second one in a notebook."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    home = Home(tmp_path / "home")
    study = written(tmp_path, "raised.py", FUNCTION.format(fates=["KeyboardInterrupt()"]))
    with pytest.raises(KeyboardInterrupt):
        drive(home, trials=1, reference=study)
    assert [state for state, _ in ended(home)] != ["failed"]
    before = signal.signal(signal.SIGINT, lambda *_: None)
    assert is_stop(Interrupted()) and not is_stop(KeyboardInterrupt())
    signal.signal(signal.SIGINT, before)


def test_a_loop_that_leaves_after_its_last_epoch_has_ended(tmp_path):
    study = written(tmp_path, "left.py", LEFT)
    home = Home(tmp_path / "home")
    drive(home, trials=2, reference=f"{study}:leaves")
    assert ended(home) == [("complete", "")] * 2
    drive(unknown := Home(tmp_path / "unknown"), trials=1, reference=f"{study}:of_unknown_length")
    assert ended(unknown) == [("complete", "")]


def test_a_loop_that_leaves_before_is_told_where(tmp_path):
    study = written(tmp_path, "left.py", LEFT)
    said: dict[int, Any] = {}
    for epochs in (0, 1):
        home = Home(tmp_path / f"home{epochs}")
        drive(home, trials=1, reference=f"{study}:leaves", overrides={"epochs": epochs, "code": 0})
        [(state, said[epochs])] = ended(home)
        assert state == "failed"
    assert said[0].startswith("left.py:12, in leaves: sys.exit() ended the training before its first report: let it")
    assert said[1].startswith("left.py:12, in leaves: sys.exit() ended the training after epoch 1 of 2: let it train")


def test_an_own_loop_that_leaves_is_judged_by_what_it_has_reported(tmp_path):
    study = written(tmp_path, "left.py", LEFT)
    home = Home(tmp_path / "home")
    drive(home, trials=3, reference=f"{study}:OWN")
    errors = {error for state, error in ended(home) if state == "failed"}
    assert sorted(state for state, _ in ended(home)) == ["complete", "complete", "failed"]
    assert len(errors) == 1 and "sys.exit() ended the training before its first report" in errors.pop()


@pytest.mark.parametrize(
    "overrides",
    [{}, {"train.lanes": 2}, pytest.param({"train.num_workers": 1}, marks=pytest.mark.process)],
    ids=["alone", "lanes", "loader"],
)
def test_whatever_a_task_raises_fails_its_trial_alone(tmp_path, overrides):
    study, home = written(tmp_path, "cancelled.py", TASK), Home(tmp_path / "home")
    drive(home, trials=5, reference=study, overrides=overrides)
    by_where = dict(zip(("nowhere", "model", "loss", "evaluate", "data"), ended(home), strict=True))
    assert by_where.pop("nowhere") == ("complete", "")
    for where, (state, error) in by_where.items():
        assert state == "failed", where
        assert "CancelledError: late" in error or "train.lanes" in error, (where, error)
    assert "cancelled.py:20, in raised: CancelledError: late" in by_where["model"][1]
