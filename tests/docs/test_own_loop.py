"""docs/guide/own-loop.md: its code runs as it stands, and an interruption at any report changes nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.storage.home import Home

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

GUIDE = ROOT / "docs" / "guide" / "own-loop.md"
CODE = re.search(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
FLAGS = ("--trials", "2", "--executor", "inline", "--sampler", "random")


def hpo(*arguments: str, home: Home):
    return CliRunner().invoke(app, [*arguments, "--home", str(home.root)])


def status(home: Home) -> dict:
    return json.loads(hpo("status", "--study", "own-loop", "--json", home=home).stdout)


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> str:
    assert CODE is not None
    file = tmp_path_factory.mktemp("own") / "own_loop.py"
    file.write_text(CODE[1])
    return str(file)


@pytest.fixture(scope="module")
def whole(study, tmp_path_factory, process) -> dict:
    """The status of the study that nothing has interrupted, by the command of the guide."""
    home = Home.at(tmp_path_factory.mktemp("whole") / "home")
    command = [sys.executable, "-m", "hpo", "run", "--study", study, *FLAGS, "--home", str(home.root)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "Warning" not in ran.stderr + ran.stdout
    verified = hpo("verify", home=home)
    assert verified.exit_code == 0, verified.output
    found = status(home)
    assert found["trials"]["complete"] == 2
    assert found["best"]["value"] < 0.2  # the mean square of a sine is 0.46
    return found


@pytest.mark.parametrize(
    "kill",
    ["worker.after_report_commit=kill@3", pytest.param("worker.before_report_commit=kill@4", marks=pytest.mark.slow)],
)
def test_killed_and_resumed_it_ends_as_the_uninterrupted_study(study, whole, home, kill):
    environment = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": kill}
    command = [sys.executable, "-m", "hpo", "run", "--study", study, *FLAGS, "--home", str(home.root)]
    assert subprocess.run(command, env=environment, capture_output=True, timeout=120).returncode == -signal.SIGKILL
    resumed = hpo("resume", "--executor", "inline", home=home)
    assert resumed.exit_code == 0, resumed.output
    assert status(home)["digest"] == whole["digest"]
    verified = hpo("verify", home=home)
    assert verified.exit_code == 0, verified.output


def test_a_loop_whose_checkpoint_is_a_directory_is_killed_and_resumed(tmp_path):
    """The second study of the page: weights and a note, below `files/` of each checkpoint."""
    file, whole, killed = tmp_path / "own_files.py", Home.at(tmp_path / "whole"), Home.at(tmp_path / "killed")
    file.write_text(re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)[1])
    ran = hpo("run", "--study", str(file), *FLAGS, home=whole)
    assert ran.exit_code == 0, ran.output
    environment = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": "worker.after_report_commit=kill@3"}
    command = [sys.executable, "-m", "hpo", "run", "--study", str(file), *FLAGS, "--home", str(killed.root)]
    assert subprocess.run(command, env=environment, capture_output=True, timeout=120).returncode == -signal.SIGKILL
    [left] = (killed.root / "checkpoints").rglob("step-00000003*")
    assert {path.name for path in (left / "files").rglob("*") if path.is_file()} == {"weights.joblib", "notes.txt"}
    resumed = hpo("resume", "--executor", "inline", home=killed)
    assert resumed.exit_code == 0, resumed.output
    digests = [json.loads(hpo("status", "--json", home=home).stdout)["digest"] for home in (whole, killed)]
    assert digests[0] == digests[1]
    verified = hpo("verify", home=killed)
    assert verified.exit_code == 0, verified.output


class Watching:
    """A reporter that keeps what it is told, and answers or preempts as it was made to."""

    def __init__(self, answer: Any = "continue", at: int = 0, leave_after: int | None = None) -> None:
        self.answer, self.at, self.looks, self.leave_after = answer, at, 0, leave_after
        self.reports: list[tuple[Any, float]] = []
        self.committed: list = []

    @property
    def preempted(self) -> bool:
        self.looks += 1
        return self.leave_after is not None and self.looks > self.leave_after

    def report(self, step, metrics, *, epoch=None, fold=0, checkpoint=None):
        from trainer.report import Verdict

        self.reports.append((epoch, metrics["val/loss"]))
        self.committed = [checkpoint, *self.committed] if checkpoint else self.committed
        return Verdict(self.answer) if epoch == self.at else Verdict()


def fit(study: str, directory: Path, reporter: Watching, committed=()):
    from hpo.declaration.references import load
    from trainer.checkpoint.store import CheckpointStore

    declared = load(f"{study}:STUDY")
    return declared.task_class()(declared.config).fit(reporter, CheckpointStore(directory, 1, committed))


@pytest.mark.parametrize(("verdict", "kind"), [("stop", "pruned"), ("pause", "paused"), ("restart_from", "restarted")])
def test_it_obeys_the_verdict_also_of_a_report_before_a_kill(study, tmp_path, verdict, kind):
    first = Watching(verdict, at=2)
    outcome = fit(study, tmp_path, first)
    assert (outcome.kind, outcome.step, outcome.epoch) == (kind, 16, 2)
    again = Watching(verdict, at=2)
    outcome = fit(study, tmp_path, again, first.committed[:1])
    assert (outcome.kind, outcome.step, outcome.epoch) == (kind, 16, 2)
    assert again.reports == first.reports[-1:]


@pytest.mark.parametrize("steps", [0, 5, 8, 21])
def test_preempted_at_any_step_it_goes_on_to_the_same_values(study, tmp_path, steps):
    oracle = Watching()
    assert fit(study, tmp_path / "whole", oracle).kind == "complete"
    left = Watching(leave_after=steps)
    outcome = fit(study, tmp_path / "left", left)
    assert (outcome.kind, outcome.step) == ("preempted", steps)
    rest = Watching()
    outcome = fit(study, tmp_path / "left", rest, left.committed[:1])
    assert (outcome.kind, outcome.step, outcome.epoch) == ("complete", 40, 5)
    assert dict(left.reports) | dict(rest.reports) == dict(oracle.reports)
    assert len(rest.reports) == 5 - len(left.reports) + bool(left.reports)


TWICE = """
from pydantic import BaseModel, ConfigDict
from hpo import Float, Objective, Study
from trainer.report import ENDS, Outcome


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    x: float = 0.5


class Twice:
    def __init__(self, config):
        self.config = config

    def fit(self, reporter, checkpoints):
        for epoch in range(1, 7):
            reporter.report(epoch, {"val/loss": self.config.x})  # of the last step, before its epoch is closed
            verdict = reporter.report(epoch, {"val/loss": self.config.x}, epoch=epoch)
            if verdict.kind in ENDS:
                return Outcome(ENDS[verdict.kind], epoch, epoch)
        return Outcome("complete", 6, 6)


STUDY = Study("twice", Config(), Twice, {"x": Float(0.0, 1.0)}, [Objective("val/loss")])
"""


@pytest.mark.parametrize("strategy", ["asha", pytest.param("asha-promote", marks=pytest.mark.slow)])
def test_a_step_reported_before_its_epoch_is_no_point_to_decide_at(tmp_path, strategy):
    file = tmp_path / "twice.py"
    file.write_text(TWICE)
    home = Home.at(tmp_path / "home")
    asked = ("--trials", "6", "--executor", "inline", "--sampler", "random", "--strategy", strategy)
    ran = hpo("run", "--study", str(file), *asked, home=home)
    assert ran.exit_code == 5
    assert "of a step only once, since the first report of a step counts." in ran.output
    assert "Error" not in ran.output


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ('return Outcome("complete", step', 'return Outcome("done", step', "returned an Outcome of kind 'done'"),
        ('"metrics": metrics}', '"metrics": metrics, "rng": {"of": [{1}]}}', "state['rng']['of']['0'], a set, cannot"),
        pytest.param(
            "step=step, epoch=epoch, metrics=metrics)",
            "step=step, epoch=epoch, metrics={'a': [1]})",
            "metric 'a' is no",
            marks=pytest.mark.slow,
        ),
        (
            "reporter.report(step, metrics, epoch",
            "reporter.report(step, {'b': []}, epoch",
            "metric 'b' is not a number",
        ),
    ],
)
def test_a_loops_mistake_fails_its_trial_in_a_sentence(study, tmp_path, home, written, instead, said):
    code = Path(study).read_text()
    assert code.count(written) == 1
    (tmp_path / "wrong.py").write_text(code.replace(written, instead))
    one = ("--trials", "1", *FLAGS[2:])
    ran = hpo("run", "--study", str(tmp_path / "wrong.py"), *one, home=home)
    assert (ran.exit_code, ran.exception.__class__) == (5, SystemExit)
    shown = hpo("show", "0", "--study", "own-loop", "--json", home=home)
    assert json.loads(shown.stdout)["outcome"] == "user_error"
    assert said in json.loads(shown.stdout)["error"]
    verified = hpo("verify", home=home)
    assert verified.exit_code == 0, verified.output


REFUSED = {
    "train.folds=2": "trains no folds: leave train.folds.",
    "train.lanes=2": "has no lanes: leave train.lanes.",
    "train.parallel.data=2": "is one process: leave train.parallel.",
}


@pytest.mark.parametrize("asked", REFUSED)
def test_what_a_loop_of_ones_own_has_not_is_refused_before_a_trial(study, home, asked):
    """Where the task is given as a class."""
    ran = hpo("run", "--study", study, *FLAGS, "-o", asked, home=home)
    assert (ran.exit_code, home.root.exists()) == (2, False)
    assert f"OwnLoop has a fit() of its own, which {REFUSED[asked]}" in ran.output


@pytest.mark.parametrize(
    "asked",
    ["train.folds=2", pytest.param("train.parallel.data=2", marks=pytest.mark.slow)],
)
def test_what_a_loop_of_ones_own_has_not_is_refused_in_its_trial(study, tmp_path, home, asked):
    """Where the task is named."""
    named = tmp_path / "named.py"
    named.write_text(Path(study).read_text().replace("task=OwnLoop", 'task=":OwnLoop"'))
    flags = ("--trials", "4", "--executor", "inline", "--sampler", "random", "-o", asked)
    ran = hpo("run", "--study", str(named), *flags, home=home)
    assert ran.exit_code == 5
    assert f"OwnLoop has a fit() of its own, which {REFUSED[asked]}" in ran.output


def test_lanes_of_a_loop_of_ones_own_that_is_named_train_one_by_one(study, tmp_path, home):
    """Nothing is read of the task before a trial, and fewer than four lanes are none."""
    named = tmp_path / "named.py"
    named.write_text(Path(study).read_text().replace("task=OwnLoop", 'task=":OwnLoop"'))
    ran = hpo("run", "--study", str(named), *FLAGS, "-o", "train.lanes=2", home=home)
    assert ran.exit_code == 0 and "train.lanes=2: trials train one by one, since" in ran.output


def test_a_study_whose_every_trial_that_came_to_its_end_failed_has_failed(study, tmp_path, home):
    code = Path(study).read_text().replace("import Float, Int, Objective", "import Constraint, Float, Int, Objective")
    bound = 'objectives=[Objective("val/loss", "minimize")], constraints=[Constraint("val/nope", upper=1)],'
    good, bad = {"lr": 0.03, "hidden_size": 64}, {"lr": 0.001, "hidden_size": 8}
    bound += f' strategy={{"name": "asha", "eta": 2}}, enqueue=[{good}, {bad}, {bad}],'
    code = code.replace('objectives=[Objective("val/loss", "minimize")],', bound)
    (tmp_path / "bound.py").write_text(code)
    ran = hpo("run", "--study", str(tmp_path / "bound.py"), "--trials", "3", "--executor", "inline", home=home)
    assert ran.exit_code == 5, ran.output
    trials = status(home)["trials"]
    assert (trials["pruned"], trials["failed"]) == (2, 1)
    assert "no trial is complete, and 1 trial failed, `hpo show 0 --study own-loop" in ran.output
