"""docs/guide/from-a-script.md: its blocks run as they stand; each study, killed and resumed, is the one left alone."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from places import ROOT
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.storage.home import Home

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

GUIDE = ROOT / "docs" / "guide" / "from-a-script.md"
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


STUDIES = {"tuned": "val/accuracy", "lit": "val/acc", "hf": "val/accuracy"}


@pytest.fixture(scope="module")
def whole(directory, tmp_path_factory) -> Callable[[str], Home]:
    """Gives the home of the study of that name that nothing has interrupted."""

    @functools.cache
    def home_of(name: str) -> Home:
        home = Home.at(tmp_path_factory.mktemp("whole") / "home")
        ran = hpo(*run(name, directory), home=home)
        assert ran.exit_code == 0, ran.output
        return home

    return home_of


def run(name: str, directory: Path) -> tuple[str, ...]:
    if name == "lit":
        pytest.importorskip("lightning", reason="runs where make test has installed lightning")
    return ("run", "--study", str(directory / f"{name}.py"), *RUN)


def status(home: Home) -> dict:
    return json.loads(hpo("status", "--json", home=home).stdout)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_of_the_page_learns_and_prunes(name, whole):
    home = whole(name)
    found = status(home)
    assert found["trials"]["complete"] + found["trials"]["pruned"] == 4
    assert found["trials"]["pruned"] >= 1
    assert found["best"]["value"] > 0.6
    curves = json.loads(hpo("show", "0", "--json", home=home).stdout)["curves"]
    assert {STUDIES[name], "train/loss"} <= curves.keys()


@pytest.mark.parametrize("name", ["tuned", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lit", "hf"))])
def test_a_killed_study_of_the_page_resumes_as_the_one_left_alone(name, directory, whole, home):
    environment = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": "worker.after_report_commit=kill@2"}
    command = [sys.executable, "-m", "hpo", *run(name, directory), "--home", str(home.root)]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = hpo("resume", "--executor", "inline", home=home)
    assert resumed.exit_code == 0, resumed.output
    assert status(home)["digest"] == status(whole(name))["digest"]
    verified = hpo("verify", home=home)
    assert verified.exit_code == 0, verified.output
