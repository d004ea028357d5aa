"""docs/guide/from-a-script.md: its blocks run as they stand; each study, killed and resumed, is the one left alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpo.cli import app
from hpo.home import Home

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # of MLflow's own doing

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "from-a-script.md"
BLOCKS = re.findall(r"[Ss]ave (?:it|this)?[^`]*?as `(\w+\.py)`.*?```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
RUN = ("--trials", "4", "--executor", "inline", "--sampler", "random", "--window", "1")


def hpo(*arguments: str, home: Home):
    return CliRunner().invoke(app, [*arguments, "--home", str(home.root)])


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """All files of the page, beside each other."""
    here = tmp_path_factory.mktemp("page")
    assert [name for name, _ in BLOCKS] == ["script.py", "tuned.py", "lit.py", "hf.py"]
    for name, code in BLOCKS:
        (here / name).write_text(code)
    return here


def test_the_script_trains_by_itself(directory):
    command = [sys.executable, "script.py"]
    ran = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout.split()[-1]) > 0.6  # of three classes


@pytest.mark.parametrize(("name", "objective"), [("tuned", "val/accuracy"), ("lit", "val/acc"), ("hf", "val/accuracy")])
def test_killed_and_resumed_a_study_of_the_page_ends_as_the_one_left_alone(name, objective, directory, tmp_path):
    if name == "lit":
        pytest.importorskip("lightning", reason="install lightning, of the extra dev, to run the module of the page")
    run = ("run", "--study", str(directory / f"{name}.py"), *RUN)
    whole, broken = Home.at(tmp_path / "whole"), Home.at(tmp_path / "broken")
    environment = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": "worker.after_report_commit=kill@2"}
    command = [sys.executable, "-m", "hpo", *run, "--home", str(broken.root)]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = hpo("resume", "--executor", "inline", home=broken)
    assert resumed.exit_code == 0, resumed.output
    ran = hpo(*run, home=whole)
    assert ran.exit_code == 0, ran.output
    found, expected = (json.loads(hpo("status", "--json", home=home).stdout) for home in (broken, whole))
    assert expected["trials"]["complete"] + expected["trials"]["pruned"] == 4
    assert found["digest"] == expected["digest"]
    assert expected["trials"]["pruned"] >= 1
    assert expected["best"]["value"] > 0.6
    curves = json.loads(hpo("show", "0", "--json", home=whole).stdout)["curves"]
    assert {objective, "train/loss"} <= curves.keys()
    verified = hpo("verify", home=broken)
    assert verified.exit_code == 0, verified.output
