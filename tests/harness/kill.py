"""Runs of the real command that are killed for real: the machinery of the kill tests."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import sqlalchemy as sa
from sqlalchemy import exists, func, select

from hpo.home import Home
from hpo.ledger import Ledger
from hpo.ledger.process import start_time
from hpo.ledger.tables import attempts, checkpoints, reports, trials, workers

STUDY = Path(__file__).with_name("tiny_study.py")
TRIALS = 16  # TPE's model proposes from trial 13 on
EVERY_STEPS = 2  # the study's train.checkpoint.every_steps
WORKERS = 2
MICRO_STEPS = 10  # of an epoch: three windows of 12 samples are 5 + 5 + 2, one of 4
MICRO_STEPS_LOST = 3 * (EVERY_STEPS + 1)  # at most, with a worker: since its last checkpoint, and in the step begun
# Values that every run of the study reports alike; what the machine does is read once a second at most.
OF_THE_TASK = select(func.count()).select_from(reports).where(~reports.c.key.like("system/%"))
STEPS = 4  # of an epoch
LANES = 4
LOST = {"driver": WORKERS, "worker": 1, "mirror": 0}  # workers that die with what is killed
_started: list[subprocess.Popen[str]] = []
T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """What leaves a line in $TINY_LOG, and how much of it a worker that is killed may leave to be done again."""

    what: str = "micro-steps"
    each_epoch: int = MICRO_STEPS
    lost: int = MICRO_STEPS_LOST


LANES_WORK = Work("steps of lanes", STEPS, LANES * (EVERY_STEPS + 1))


@dataclass
class Run:
    """One home and the commands run on it. `extra` goes to `hpo run`."""

    home: Path
    trials: int = TRIALS
    extra: tuple[str, ...] = ("--workers", str(WORKERS), "--window", "4")
    study: Path = STUDY
    name: str = "tiny"
    work: Work = Work()
    environ: dict[str, str] = field(default_factory=dict)

    def start(self, *command: str) -> subprocess.Popen[str]:
        """`hpo COMMAND --home HOME`, its output kept."""
        environ = os.environ | {"TINY_LOG": str(self.home.with_suffix(".steps")), "HPO_LEASE_SECONDS": "20"}
        process = subprocess.Popen(
            [sys.executable, "-m", "hpo", *command, "--home", str(self.home)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ | self.environ,
            start_new_session=True,
        )
        _started.append(process)
        return process

    def run(self) -> subprocess.Popen[str]:
        return self.start("run", "--study", str(self.study), "--trials", str(self.trials), *self.extra)

    def resume(self) -> subprocess.Popen[str]:
        return self.start("resume", "--study", self.name, "--workers", str(WORKERS))

    def finished(self, process: subprocess.Popen[str], code: int = 0, timeout: float = 120) -> str:
        output, _ = process.communicate(timeout=timeout)
        assert process.returncode == code, f"exit code {process.returncode}, not {code}:\n{output}"
        return output

    def status(self) -> dict:
        return json.loads(self.finished(self.start("status", "--study", self.name, "--json")))

    def query(self, statement: sa.Select) -> list[sa.Row]:
        """Rows of the ledger, or none while there is no ledger yet."""
        if not (self.home / "ledger.db").exists():
            return []
        ledger = Ledger(Home(self.home).storage)
        try:
            with ledger.read() as connection:
                return list(connection.execute(statement).all())
        finally:
            ledger.close()

    def writable(self) -> bool:
        """Whether nobody holds the ledger's write lock for as long as a second."""
        connection = sqlite3.connect(self.home / "ledger.db", timeout=1, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        else:
            return True
        finally:
            connection.close()

    def where(self) -> str:
        """How far the study is, for people."""
        states = Counter(state for (state,) in self.query(select(trials.c.state)))
        [(count,)] = self.query(select(func.count()).select_from(reports)) or [(0,)]
        return f"{dict(sorted(states.items()))}, {count} reported values"


def end_all() -> None:
    """End what a failed test has left, so that no other test meets it."""
    for process in _started:
        if process.poll() is None:
            for part in (*psutil.Process(process.pid).children(recursive=True), process):
                part.kill()
            process.communicate()
    _started.clear()


@dataclass(frozen=True)
class Golden:
    """The uninterrupted study: its digest, the values it reports, the seconds from its first claim to its last tell."""

    digest: str
    values: int
    seconds: float


def golden_run(home: Path, *extra: str, **of: Any) -> Golden:
    run = Run(home, **of)
    run.extra = extra or run.extra
    run.finished(run.run())
    digest = run.status()["digest"]
    check_sound(run, digest, lost=0)
    [(first,)] = run.query(select(func.min(attempts.c.started_at)))
    [(last,)] = run.query(select(func.max(trials.c.ended_at)))
    [(values,)] = run.query(OF_THE_TASK)
    return Golden(digest, values, last - first)


def wait_until(what: Callable[[], T], process: subprocess.Popen[str], seconds: float = 240, pause: float = 0.05) -> T:
    """What `what` gives once that is something, which must be while the process runs; else its output is told."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        if process.poll() is not None or time.monotonic() > deadline:
            ended = process.poll()
            process.kill()
            pytest.fail(f"not within {seconds:g} s; exit code {ended}; {process.communicate()[0]}")
        time.sleep(pause)
    return found


def first_claim(run: Run, process: subprocess.Popen[str]) -> None:
    """Wait for the first attempt."""
    wait_until(lambda: run.query(select(attempts.c.fence).limit(1)), process, 60, pause=0.01)


def pid_of(target: str, run: Run, driver: subprocess.Popen[str], rng: random.Random) -> int | None:
    """The pid of the driver, of a live worker, or of the mirror; None if there is none at the moment."""
    if target == "driver":
        return driver.pid
    children = psutil.Process(driver.pid).children() if driver.poll() is None else []
    pids = sorted(child.pid for child in children if f"hpo.{target}" in child.cmdline())
    return rng.choice(pids) if pids else None


def check_sound(run: Run, golden: str, lost: int) -> None:
    """Everything that must hold once an interrupted study has ended, `lost` of whose workers were killed."""
    status = run.status()
    assert status["state"] == "complete"
    assert status["digest"] == golden
    told = sorted(place for (place,) in run.query(select(trials.c.told)))
    assert told == list(range(run.trials)), "every trial is told once"
    trained = len(run.home.with_suffix(".steps").read_text().split())
    due = run.work.each_epoch * sum(epochs for (epochs,) in run.query(select(trials.c.epoch - trials.c.from_epoch)))
    retrained = trained - due
    assert 0 <= retrained <= lost * run.work.lost, f"{retrained} {run.work.what} were trained again"
    verified = run.finished(run.start("verify", "--study", run.name))
    assert "differs" not in verified and "behind" not in verified, verified
    seen = {what: int(count) for count, what in re.findall(r"(\d+) (runs|points)", verified)}
    [(values,)] = run.query(select(func.count()).select_from(reports))
    assert seen["runs"] == run.trials + 1 and seen["points"] >= values > 0, f"MLflow has not got all: {verified}"


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    """Whether all of them die within the time."""
    deadline = time.monotonic() + seconds
    while any(start_time(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def wait_for_progress(run: Run, driver: subprocess.Popen[str], target: str, values: int, rng: random.Random) -> int:
    """The pid of `target`, once so many values are reported and it lives."""
    while True:
        assert driver.poll() is None, driver.communicate()[0]
        [(count,)] = run.query(OF_THE_TASK)
        if count >= values and (pid := pid_of(target, run, driver, rng)) is not None:
            return pid
        time.sleep(0.01)


def stop_in_a_trial(run: Run) -> tuple[int, int, int]:
    """SIGSTOP a worker that has reported and saved in its trial: its pid, the trial, the attempt's fence.

    Not within a write transaction: SQLite's lock would be stopped with it, and everybody would wait for that.
    """
    a = attempts.c
    wrote = [exists().where(t.c.trial_id == a.trial_id, t.c.fence == a.fence) for t in (reports, checkpoints)]
    busy = select(workers.c.pid, a.trial_id, a.fence).join(attempts).where(a.outcome.is_(None), *wrote)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for pid, trial_id, fence in run.query(busy):
            os.kill(pid, signal.SIGSTOP)
            if (pid, trial_id, fence) in run.query(busy) and run.writable():
                return pid, trial_id, fence
            os.kill(pid, signal.SIGCONT)
    raise AssertionError("no worker has reported and saved anything")


def kill_at(run: Run, target: str, share: float, golden: Golden, rng: random.Random) -> str:
    """Run, SIGKILL `target` at `share` of the way between first claim and last tell, end the study; where it fell.

    The way is measured in reported values, so the kill falls however fast the machine is. A study as short as this one
    is nearly over when the mirror has imported MLflow, so its run is made slower; how long a step takes does not enter
    the digest. Where the study ends all the same before the kill, another one is killed earlier.
    """
    if target == "mirror":
        run.extra += ("-o", "pause=0.08")
    driver = run.run()
    first_claim(run, driver)
    pid = wait_for_progress(run, driver, target, int(share * golden.values), rng)
    time.sleep(rng.random() * golden.seconds / golden.values * 10)  # between two reports as well as at one
    fell, [(told,)] = run.where(), run.query(select(func.count(trials.c.told)))
    if told == run.trials:
        assert share > 0.1, f"no kill falls between the first claim and the last tell: {fell}"
        run.finished(driver)
        run.home = run.home.with_name(f"{run.home.name}-again")
        return kill_at(run, target, 0.8 * share, golden, rng)
    children = [pid for (pid,) in run.query(select(workers.c.pid))]
    os.kill(pid, signal.SIGKILL)
    if target == "driver":
        run.finished(driver, -signal.SIGKILL)
        assert gone(children), "workers outlive their driver"
        run.finished(run.resume())
    else:
        run.finished(driver)
    return fell
