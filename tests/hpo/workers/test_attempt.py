"""Each kind of failure has its rule: the state of its trial, what MLflow is told, what becomes of the study."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from types import ModuleType

import mlflow
import pytest
from made_rows import trial_row
from mirrored import Made, sync
from sqlalchemy import select
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.declaration.budget import Budget
from hpo.driver.failure_streak import FailureStreak
from hpo.ledger import Ledger, transactions
from hpo.ledger.database.tables import trials
from hpo.ledger.views.trial import attempts_of
from hpo.storage.home import Home
from hpo.verify import verify
from hpo.workers.attempt import outcome_of
from trainer.errors import TrainerError

pytestmark = pytest.mark.whole

# Every trial ends as its parameter says.
KINDS = """
import math
from pydantic import BaseModel, ConfigDict
from hpo import Choice, Constraint, Objective, Study
from trainer.errors import ConfigError
from trainer.report import Outcome

class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    fate: str = "well"

class Unsaid(RuntimeError):
    def __str__(self):
        return self.args[0]["no such key"]

class Fated:
    def __init__(self, config):
        self.fate = config.fate

    def fit(self, reporter, checkpoints):
        if self.fate == "bug":
            raise ZeroDivisionError("a bug of the user's")
        if self.fate == "configuration":
            raise ConfigError("train.optim.name=odd cannot be trained.")
        if self.fate == "memory":
            return Outcome("out_of_memory", 0, 0, error="a micro-batch of one sample does not fit.")
        if self.fate == "allocation":
            raise MemoryError
        if self.fate == "unsaid":
            raise Unsaid({})
        if self.fate == "divergence":
            return Outcome("nonfinite", 0, 0, error="loss is NaN at step 3.")
        loss = math.nan if self.fate == "objective" else -9.0 if self.fate == "bound" else 0.5
        name = "val/los" if self.fate == "name" else "val/loss"
        reporter.report(1, {name: loss, "size": 20.0 if self.fate == "bound" else 10.0}, epoch=1)
        return Outcome("complete", 1, 1)

FATES = ["well", "bug", "configuration", "memory", "allocation", "unsaid", "name", "divergence", "objective", "bound"]
STUDY = Study(
    "kinds",
    Config(),
    Fated,
    {"fate": Choice(FATES)},
    [Objective("val/loss")],
    constraints=[Constraint("size", upper=15)],
    sampler="tpe",
    enqueue=[{"fate": fate} for fate in FATES],
)
"""
# No pass over more than a hundred samples fits.
SHORT = """
from hpo import Float, Objective, Study
from studies.mlp.config import Config
from studies.mlp.task import MlpTask

class Task(MlpTask):
    def loss(self, model, batch):
        if len(batch[1]) > 100:
            raise MemoryError
        return super().loss(model, batch)

STUDY = Study("short", Config(), Task, {"model.dropout": Float(0.0, 0.5)}, [Objective("val/loss")])
"""
NEVER_FINITE = """for epoch in range(1, 6):
            verdict = reporter.report(epoch, {name: loss, "size": 10.0}, epoch=epoch)
            if verdict.kind != "continue":
                return Outcome("pruned", epoch, epoch)
        return Outcome("complete", epoch, epoch)"""
# fate -> the trial's state, its outcome, MLflow's status, a part of its error
RULES = {
    "well": ("complete", "complete", "FINISHED", ""),
    "bug": ("failed", "user_error", "FAILED", "kinds.py:22, in fit: ZeroDivisionError: a bug of the user's"),
    "configuration": ("failed", "bad_config", "FAILED", "train.optim.name=odd cannot be trained."),
    "memory": ("infeasible", "out_of_memory", "FAILED", "does not fit"),
    "allocation": ("infeasible", "out_of_memory", "FAILED", "out of memory, kinds.py:28, in fit: MemoryError"),
    "unsaid": ("failed", "user_error", "FAILED", "kinds.py:30, in fit: Unsaid, whose text cannot be had (KeyError)"),
    "name": ("failed", "user_error", "FAILED", "no epoch has reported 'val/loss', by which the study judges; did you"),
    "divergence": ("infeasible", "nonfinite", "FAILED", "loss is NaN at step 3"),
    "objective": ("infeasible", "nonfinite", "FAILED", "val/loss is not finite at the end"),
    "bound": ("infeasible", "infeasible", "FAILED", "size 20 is above 15."),
}


def hpo(*arguments: str, home: Home, code: int = 0):
    result = CliRunner().invoke(app, [*arguments, "--home", str(home.root)])
    assert result.exit_code == code, (result.output, result.stderr)
    return result


@pytest.fixture
def study(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine" / "kinds.py"
    file.write_text(KINDS)
    return file


@pytest.mark.usefixtures("process")
def test_every_kind_of_end_has_its_state_and_tag_and_one_can_be_best(tmp_path, study):
    home = Home(tmp_path / "home")
    hpo("run", "--study", str(study), "--trials", str(len(RULES)), "--executor", "inline", home=home)
    with Ledger(home.storage).read() as connection:
        rows = connection.execute(select(trials).order_by(trials.c.number)).mappings().all()
    runs = {run.data.tags.get("hpo.trial"): run for run in runs_of(home, "kinds")}
    for row, (fate, (state, outcome, status, error)) in zip(rows, RULES.items(), strict=True):
        assert (row["state"], row["outcome"]) == (state, outcome), fate
        assert error in (row["error"] or "")
        assert bool(row["traceback"]) == (fate in ("bug", "unsaid"))
        run = runs[str(row["number"])]
        assert (run.data.tags["hpo.state"], run.data.tags["hpo.outcome"]) == (state, outcome)
        assert run.info.status == status
        assert run.data.tags.get("hpo.error", "") == (row["error"] or "")
    best = json.loads(hpo("best", "--json", home=home).stdout)
    assert (best["number"], best["value"]) == (0, 0.5), "what breaks a bound has the better loss"
    hpo("verify", home=home)


def test_attempts_that_made_way_were_lost_or_short_of_memory_are_tagged(home):
    made = Made(home)
    made.ask(2)
    made.finish(made.claim(), "preempted")
    lost = made.claim()
    made.ledger.transact(lambda c: transactions.lose(c, lost.trial_id, lost.fence, "its host is gone"))
    made.finish(made.claim(), "preempted")
    for size in (8, 4):
        last, fields = made.claim(), {"step": 3, "micro_batch_size": size}
        made.ledger.transact(lambda c, of=(last, "out_of_memory", fields, str(size)): transactions.record(c, *of))
        made.finish(last, "preempted" if size == 8 else "complete", values=[0.5])
    made.complete()
    sync(made)
    tags = {run.data.tags.get("hpo.trial"): run.data.tags for run in runs_of(home, "s")}
    names = ("hpo.losses", "hpo.preemptions", "hpo.micro_batch_size")
    assert [tags["0"].get(name) for name in names] == ["1", "3", "4"]
    assert [tags["1"].get(name) for name in names] == ["0", "0", None]
    made.ledger.close()
    file = home.root / "mlflow.db"
    for statement, differing in (
        ("UPDATE tags SET value = '3' WHERE key = 'hpo.preemptions'", 1),
        (f"DELETE FROM tags WHERE key IN {names[1:]}", 0),  # as an earlier release has left them
        ("DELETE FROM tags WHERE key = 'hpo.losses'", 2),
    ):
        with closing(sqlite3.connect(file)) as connection:
            connection.execute(statement)
            connection.commit()
        found = verify(home, home.storage, home.tracking_uri).differences
        assert len(found) == differing, found


@pytest.mark.usefixtures("process")
def test_what_memory_has_left_of_a_trials_micro_batch_is_on_its_run(home, tmp_path):
    (tmp_path / "short.py").write_text(SHORT)
    flags = ("--trials", "1", "--executor", "inline", "-o", "train.num_epochs=1", "-o", "train.batch_size=256")
    hpo("run", "--study", str(tmp_path / "short.py"), *flags, home=home)
    [tags] = [run.data.tags for run in runs_of(home, "short") if "hpo.trial" in run.data.tags]
    assert (tags["hpo.outcome"], tags["hpo.micro_batch_size"], tags["hpo.preemptions"]) == ("complete", "64", "0")
    hpo("verify", home=home)


def runs_of(home: Home, study: str) -> list:
    client = mlflow.MlflowClient(home.tracking_uri)
    [experiment] = [one for one in client.search_experiments() if one.name == study]
    return client.search_runs([experiment.experiment_id])


@pytest.mark.usefixtures("process")
def test_a_study_of_infinite_losses_alone_has_failed(tmp_path, study):
    study.write_text(
        study.read_text()
        .replace(
            'reporter.report(1, {name: loss, "size": 20.0 if self.fate == "bound" else 10.0}, epoch=1)\n        ', ""
        )
        .replace('return Outcome("complete", 1, 1)', NEVER_FINITE)
    )
    flags = ("--trials", "2", "--executor", "inline", "-o", "fate=objective", "--sampler", "random")
    home = Home(tmp_path / "home")
    result = hpo("run", "--study", str(study), *flags, home=home, code=5)
    assert "2 infeasible" in result.output
    assert "none of 2 trials gave a finite value, `hpo show 0 --study kinds" in result.stderr
    assert "search lower learning rates" in result.stderr
    shown = hpo("show", "0", "--study", "kinds", home=home).stdout
    assert "val/loss is not finite at step 4, where the trial was stopped." in shown
    tags = [run.data.tags for run in runs_of(home, "kinds") if "hpo.trial" in run.data.tags]
    assert [(one["hpo.state"], one["hpo.outcome"]) for one in tags] == [("infeasible", "nonfinite")] * 2
    hpo("verify", home=home)


@pytest.mark.usefixtures("process")
def test_equal_tracebacks_end_a_study_and_are_shown_once(tmp_path, study):
    home = Home(tmp_path / "home")
    broken = ("-o", "fate=bug", "--executor", "inline", "--trials", "9", "--sampler", "random", "--window", "1")
    result = hpo("run", "--study", str(study), *broken, home=home, code=5)
    assert result.stderr.count("Traceback (most recent call last)") == 1
    assert result.stderr.count("ZeroDivisionError: a bug of the user's") == 1
    assert "3 trials in a row failed in the same way" in result.stderr
    assert json.loads(hpo("status", "--json", home=home).stdout)["trials"]["failed"] == 3
    said = "kinds.py:22, in fit: ZeroDivisionError: a bug of the user's"
    lines = [line for line in result.stdout.splitlines() if said in line]
    assert [line.split()[:3] for line in lines] == [["trial", str(number), "failed"] for number in range(3)]
    assert f"hpo show 0 --study kinds --home {home.root}" in result.stdout


def test_tracebacks_are_equal_whatever_the_address_of_an_object():
    one = {"state": "failed", "outcome": "user_error", "error": None, "epoch": 0, "from_epoch": 0}
    rows = [trial_row(**one, number=n, traceback=f"TypeError: <Net at 0x7f{n}a40d1b5f0>") for n in range(3)]
    other = trial_row(**one, number=2, traceback="TypeError: <Other at 0x7f2a40d1b5f0>")
    assert FailureStreak(Budget(trials=9), 0, rows).full
    assert not FailureStreak(Budget(trials=9), 0, [*rows[:2], other]).full


def test_a_failures_place_is_in_the_studys_code_never_in_a_library(tmp_path):
    (tmp_path / "own.py").write_text("import json\ndef loss():\n    json.loads('{')\n")
    module = ModuleType("own")
    exec(compile((tmp_path / "own.py").read_text(), str(tmp_path / "own.py"), "exec"), module.__dict__)
    with pytest.raises(ValueError) as caught:
        module.loss()
    outcome = outcome_of(ValueError("twice\nsaid").with_traceback(caught.value.__traceback__))
    assert outcome.error == "own.py:3, in loss: ValueError: twice\nsaid"
    assert outcome.traceback and "json/decoder.py" in outcome.traceback
    assert outcome_of(TrainerError("The trainer's own sentence.")).error == "The trainer's own sentence."


def test_an_attempt_that_is_found_dead_ended_with_its_last_report(home, monkeypatch):
    """A driver that resumes a day later does not count the day as training."""
    made = Made(home)
    made.ask(2)
    ends = []
    for reports in (3, 0):
        begun = made.claim()
        for step in range(1, reports + 1):
            made.report(begun, step, {"loss": 0.5})
        last = time.time()
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda at=last: at + 86_400)
            made.ledger.transact(
                lambda c, key=(begun.trial_id, begun.fence): transactions.lose(c, *key, "gone", counted=False)
            )
        with made.ledger.read() as connection:
            [attempt] = [row for row in attempts_of(connection, begun.trial_id) if row.fence == begun.fence]
        assert attempt.outcome == "lost" and attempt.started_at <= attempt.ended_at <= last
        ends.append(attempt.ended_at - attempt.started_at)
    assert ends[0] > 0 and ends[1] == 0
    made.ledger.close()
