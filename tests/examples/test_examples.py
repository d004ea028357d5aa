"""The examples run as they stand; each, killed and resumed, ends as the one left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

import hpo

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# of the best, less being worse
LEAST = {"digits_sklearn": 0.8, "digits_torch": 0.8, "boosting_lightgbm": -0.3, "boosting_xgboost": -0.3}
FLAGS = ("--trials", "3", "--executor", "inline", "--seed", "1")


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_killed_and_resumed_an_example_is_the_one_left_alone(file: Path, tmp_path):
    command = [sys.executable, "-m", "hpo", "run", "--study", str(file), *FLAGS, "--home"]
    ran = subprocess.run([*command, str(tmp_path / "whole")], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    whole = hpo.open(home=tmp_path / "whole")
    sign = 1 if whole.to_optuna().direction.name == "MAXIMIZE" else -1
    assert sign * whole.best["value"] > LEAST[file.stem]
    kill = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": "worker.after_report_commit=kill@5"}
    killed = subprocess.run([*command, str(tmp_path / "killed")], env=kill, capture_output=True, timeout=200)
    assert killed.returncode == -signal.SIGKILL
    again = hpo.resume(home=tmp_path / "killed", progress=False)
    assert again.state == "complete" and again.digest == whole.digest


def test_what_a_user_writes_beside_the_training_is_little():
    """At most 12 lines that would not stand in a script without hpo."""
    for file in EXAMPLES:
        lines = [line.strip() for line in file.read_text().split("\ndef ")[1].splitlines()]
        added = [line for line in lines if "trial." in line or line in ("return", "if saved:")]
        assert len(added) <= 12, f"{file.name}: {len(added)}"
