"""Workers that die: of a trial they die over, of what makes any of them die, and what such a run leaves behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from places import HARNESS
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.storage.home import Home

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

STUDY = str(HARNESS / "killer_study.py")
FLAGS = ("--study", STUDY, "--sampler", "random", "--strategy", "none", "--seed", "3", "--workers", "2")


def hpo(home: Home, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"KILLS_BELOW": "0"} | environ
    command = [sys.executable, "-m", "hpo", *arguments, "--home", str(home.root)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def read(home: Home, *arguments: str) -> str:
    """What a reading command says, from this process: each of its own would load MLflow."""
    ran = CliRunner().invoke(app, [*arguments, "--home", str(home.root)])
    assert ran.exit_code == 0, ran.output
    return ran.stdout


def verified(home: Home) -> None:
    found = read(home, "verify")
    assert "0 differences" in found and "behind" not in found, found


def status(home: Home) -> dict:
    return json.loads(read(home, "status", "--json"))


def test_a_configuration_that_kills_its_process_fails_only_its_trial(home):
    one = ("--trials", "4", "--workers", "1")
    ran = hpo(home, "run", *FLAGS, *one, KILLS_BELOW="2e-4")  # trial 0 of this seed is the only one
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = status(home)
    assert found["state"] == "complete"
    assert {state: count for state, count in found["trials"].items() if count} == {"complete": 4, "failed": 1}
    trial = json.loads(read(home, "show", "0", "--json"))
    how = r"ended by SIGKILL \(killed from outside, as for want of memory\)"
    assert re.fullmatch(rf"its worker was lost 6 times; last: pid \d+ on \S+ {how}", trial["error"])
    assert [attempt["outcome"] for attempt in trial["attempts"]] == ["lost"] * 6
    verified(home)


HANGS = """
import ctypes
from pathlib import Path
import hpo

@hpo.study(space={"x": hpo.Float(0.0, 1.0)}, minimize="loss", num_epochs=1, strategy="none", sampler="random")
def hangs(trial):
    mark = Path(__file__).with_name("hung")
    if not mark.exists():
        mark.touch()
        ctypes.PyDLL(None).sleep(600)  # which holds Python's lock, as a hang in native code may
    trial.report(1, {"loss": trial.params.x})
"""


def test_a_worker_that_hangs_in_native_code_is_killed_and_replaced(home, tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    study = ("--study", str(tmp_path / "hangs.py"), "--trials", "3", "--workers", "1")
    ran = hpo(home, "run", *study, HPO_LEASE_SECONDS="3")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"worker pid \d+ on \S+ has been silent for 3 s: it is killed, and another", ran.stderr)
    assert [attempt["outcome"] for attempt in json.loads(read(home, "show", "0", "--json"))["attempts"]] == [
        "lost",
        "complete",
    ]
    verified(home)


@pytest.mark.slow
def test_a_study_whose_every_configuration_kills_is_stopped(home):
    """What is lost is asked for anew: without an end to it, such a study would have none."""
    ran = hpo(home, "run", *FLAGS, "--trials", "12", KILLS_BELOW="2")
    assert ran.returncode == 5
    assert "3 trials in a row failed in the same way:\nits worker was lost 6 times" in ran.stderr
    assert status(home)["state"] == "stopped"
    verified(home)


def test_workers_that_cannot_go_on_end_the_run_and_leave_nothing_behind(home):
    broken = {"HPO_TESTING": "1", "HPO_FAILPOINTS": "worker.after_claim=raise:EIO"}
    ran = hpo(home, "run", *FLAGS, "--trials", "3", **broken)
    assert ran.returncode == 1
    sentence = ran.stderr.strip().splitlines()[-1]
    assert re.match(r"error: workers cannot go on \(exit code 5 after trial \d; OSError: .*worker-\d\.log\.$", sentence)
    verified(home)
    assert (status(home)["state"], status(home)["trials"]["running"]) == ("interrupted", 0)
    assert hpo(home, "resume").returncode == 0
    assert status(home)["trials"]["complete"] == 3
    verified(home)


def test_a_gpu_that_torch_cannot_use_is_left_alone_unless_asked_for(home):
    """One that no host has stands for one beside a CPU build of torch: two workers would have a half each."""
    asked = hpo(home, "run", *FLAGS, "--trials", "2", "--gpus-per-worker", "0.5", CUDA_VISIBLE_DEVICES="99")
    assert asked.returncode == 1
    said = r"error: workers cannot go on \(exit code 5; error: --gpus-per-worker 0.5: torch \S+ finds no GPU .*log\.$"
    assert re.match(said, asked.stderr.strip().splitlines()[-1]), asked.stderr
    chosen = hpo(home, "run", *FLAGS, "--name", "chosen", "--trials", "2", CUDA_VISIBLE_DEVICES="99")
    assert chosen.returncode == 0, chosen.stderr
