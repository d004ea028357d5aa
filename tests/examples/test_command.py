"""examples/command: the study of a command runs as it stands; killed and resumed it ends as the one left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from places import ROOT

import hpo

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

EXAMPLE = ROOT / "examples" / "command" / "digits.yaml"
FLAGS = ("--trials", "3", "--executor", "inline", "--seed", "1", "--strategy", "none")


def test_killed_and_resumed_the_example_is_the_one_left_alone(tmp_path):
    command = [sys.executable, "-m", "hpo", "run", "--study", str(EXAMPLE), *FLAGS, "--home"]
    ran = subprocess.run([*command, str(tmp_path / "whole")], capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    whole = hpo.open(home=tmp_path / "whole")
    assert whole.best["value"] > 0.8
    kill = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": "worker.after_report_commit=kill@5"}
    killed = subprocess.run([*command, str(tmp_path / "killed")], env=kill, capture_output=True, timeout=280)
    assert killed.returncode == -signal.SIGKILL
    again = hpo.resume(home=tmp_path / "killed", progress=False)
    assert again.state == "complete" and again.digest == whole.digest


def test_the_example_is_a_script_by_itself(tmp_path):
    script = [sys.executable, str(EXAMPLE.with_name("digits.py")), "--epochs", "2"]
    ran = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.count('report: {"metrics": {"val/accuracy": ') == 2
