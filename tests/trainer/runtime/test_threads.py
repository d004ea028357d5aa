"""The threads that the environment gives the libraries of numbers change no study."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from driven import driven
from threadpoolctl import threadpool_info, threadpool_limits
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.driver.request import request_of
from hpo.ledger import Ledger
from hpo.storage.home import Home
from hpo.workers.executors.base import Executor
from hpo.workers.executors.inline import Inline
from hpo.workers.executors.local import Local
from trainer.runtime.threads import VARIABLES, limited

pytestmark = pytest.mark.whole

# Sums so long that a BLAS shares them among its threads, and so badly conditioned that any other order shows: one as
# the task's module is imported, one as it is made, one in its fit.
STUDY = """
from pydantic import BaseModel
from hpo import Float, Objective, Study

class Config(BaseModel):
    scale: float = 1.0

def task():
    import numpy as np
    from trainer.report import Outcome

    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal(200_000) * 10.0 ** generator.integers(-8, 8, 200_000) for _ in range(2))
    imported = float(x @ y)

    class Task:
        def __init__(self, config):
            self.scale = config.scale
            self.made = float((x * self.scale) @ y)

        def fit(self, reporter, checkpoints):
            values = {"imported": imported, "made": self.made, "loss": float((x + self.scale) @ y)}
            reporter.report(1, values, epoch=1)
            return Outcome("complete", 1)

    return Task

def __getattr__(name):
    if name == "Task":
        return task()
    raise AttributeError(name)

STUDY = Study("sums", Config(), ":Task", {"scale": Float(0.5, 2.0)}, [Objective("loss", "minimize")], sampler="random")
"""


@pytest.mark.usefixtures("process")
def test_one_digest_whatever_the_environment_says_and_whoever_trains(tmp_path, monkeypatch):
    """A driver in this process, with one thread and with two, and a worker that its environment gives two."""
    (tmp_path / "sums.py").write_text(STUDY)
    found = {}
    for threads in (1, 2):
        with threadpool_limits(threads):
            found[threads] = drive(tmp_path, f"inline-{threads}", Inline())
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found["local"] = drive(tmp_path, "local", Local(1))
    assert len(set(found.values())) == 1, found


def drive(directory: Path, name: str, executor: Executor) -> str:
    """The digest of the study as `executor` trains it, without its mirror."""
    home = Home(directory / name).create()
    with closing(Ledger(home.storage)) as ledger:
        request = request_of(home, str(directory / "sums.py"), name="sums", seed=1)
        assert driven(ledger, request, executor, trials=1) == ("sums", "complete")
    return digest(home.root)


@pytest.mark.slow
def test_one_digest_of_commands_whose_environments_differ(tmp_path):
    (tmp_path / "sums.py").write_text(STUDY)
    found = {}
    for threads in (None, "1", "2"):
        hpo(tmp_path, threads, *study_in(tmp_path, f"{threads}", "inline"))
        found[threads] = digest(tmp_path / f"{threads}")
    assert len(set(found.values())) == 1, found


def study_in(directory: Path, home: str, executor: str) -> list[str]:
    study = ["--study", str(directory / "sums.py"), "--name", "sums", "--seed", "1", "--trials", "1"]
    return ["run", *study, "--executor", executor, "--home", str(directory / home)]


def digest(home: Path) -> str:
    return json.loads(CliRunner().invoke(app, ["status", "--study", "sums", "--json", "--home", str(home)]).stdout)[
        "digest"
    ]


def hpo(directory: Path, threads: str | None, *arguments: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environ |= {"OMP_NUM_THREADS": threads} if threads else {}
    command = [sys.executable, "-m", "hpo", *arguments]
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_threads_are_given_back():
    def threads() -> list[int]:
        return [torch.get_num_threads(), *(pool["num_threads"] for pool in threadpool_info())]

    assert np.ones(2) @ np.ones(2) == 2
    before, environ = threads(), dict(os.environ)
    with limited(3):
        assert set(threads()) == {3}
        assert {os.environ[name] for name in VARIABLES} == {"3"}
    assert (threads(), dict(os.environ)) == (before, environ)
