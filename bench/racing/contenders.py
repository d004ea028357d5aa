"""The contenders: a command each, started in a directory of its own, and killed with all of its processes."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.racing.show import TAUGHT
from trainer.runtime.lifeline import die_with

ROOT = Path(__file__).parent.parent.parent
Command = Callable[[Path, Mapping[str, Any], int, int], list[str]]  # directory, workload, seed, processes


def hpo(directory: Path, workload: Mapping[str, Any], seed: int, processes: int) -> list[str]:
    """The product's own command, all of whose search is its default."""
    fields = [
        f"-o{path}={str(value).lower() if value is True else value}" for path, value in workload["overrides"].items()
    ]
    run = ["run", "--study", workload["name"], "--trials", "1000000", "--seed", str(seed), "--workers", str(processes)]
    return [sys.executable, "-m", "hpo", *run, "--home", str(directory / "home"), *fields]


EARLIER_SEED, EARLIER_TRIALS = 1000, {"mlp": 64, "convnet": 12, "gpt": 12}  # about what a race of the workload trains


def taught(directory: Path, workload: Mapping[str, Any], seed: int, processes: int) -> list[str]:
    """The same command in a home with one finished study of the workload under another seed, of which hpo learns by
    default. That study is trained once, and copied before the clock starts."""
    home = directory / "home"
    shutil.copytree(_earlier(workload["name"], hpo(directory, workload, EARLIER_SEED, processes), home), home)
    return [*hpo(directory, workload, seed, processes), "--name", "raced"]


_KEPT: dict[str, Path] = {}


def _earlier(name: str, command: list[str], home: Path) -> Path:
    """The home of the earlier study of a workload."""
    if name not in _KEPT:
        at = command.index("--trials") + 1
        subprocess.run([*command[:at], str(EARLIER_TRIALS[name]), *command[at + 1 :]], check=True, capture_output=True)
        kept = Path(tempfile.mkdtemp(prefix="race-earlier-"))
        atexit.register(shutil.rmtree, kept, ignore_errors=True)
        _KEPT[name] = Path(shutil.copytree(home, kept / "home"))
        shutil.rmtree(home)
    return _KEPT[name]


def program(name: str, *options: str) -> Command:
    """One of the programs beside this file."""
    return lambda directory, workload, seed, processes: [
        sys.executable, "-m", f"bench.racing.{name}", str(directory), str(seed), str(processes), *options
    ]  # fmt: skip


def syne_tune(python: str) -> Command:
    made = program("syne_tune_asha")
    return lambda *of: [python, *made(*of)[1:]]


def contenders(python_of_syne_tune: str | None) -> dict[str, Command]:
    """Every contender by its name; Syne Tune where an interpreter that has it is given."""
    found: dict[str, Command] = {
        "hpo": hpo,
        TAUGHT: taught,
        "Optuna, TPE and median": program("optuna_loop", "median"),
        "Optuna, TPE and Hyperband": program("optuna_loop", "hyperband"),
        "Ray Tune, ASHA": program("ray_tune"),
    }
    return found | ({"Syne Tune, ASHA": syne_tune(python_of_syne_tune)} if python_of_syne_tune else {})


def race(command: list[str], directory: Path, budget: float) -> tuple[float, int | None]:
    """Run a command for so many seconds: when it started, and its exit code where it had ended before."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "RAY_USAGE_STATS_ENABLED": "0",
        "GIT_PYTHON_REFRESH": "quiet",
        "SYNETUNE_FOLDER": str(directory),
    }
    with (directory / "log.txt").open("w") as log:
        started = time.time()
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),  # a race that is killed leaves none running
        )  # fmt: skip
        try:
            code = process.wait(budget)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill(process)
    return started, code


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and everything it has started, in whatever session: Ray's are in sessions of their own."""
    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(process.pid).suspend()  # so that it starts no other in the meantime
        below = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    psutil.wait_procs(below, timeout=30)
