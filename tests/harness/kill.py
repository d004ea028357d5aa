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
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import sqlalchemy as sa
import warm
from once import once
from processes import runs
from sqlalchemy import exists, func, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import SADeprecationWarning
from study_runs import begin
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.ledger import Ledger
from hpo.ledger.database.tables import attempts, checkpoints, reports, trials, workers
from hpo.ledger.process_id import start_time
from hpo.storage.home import Home

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
AT_ONCE = ("-o", "pause=0.0")  # where it matters to nobody how long a step takes, which is no part of a digest
SECONDS = 240  # for one command, on a machine that does much else
LOST = {
    "driver": WORKERS,
    "worker": 1,
    "program": 1,
    "mirror": 0,
    "prepared": 0,
}  # attempts that end with what is killed
PROGRAMS = ("command_script.py", "patterns_script.py")
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
    """One home and the commands run on it. `extra` goes to `hpo run`, `resumed` to `hpo resume`."""

    home: Path
    trials: int = TRIALS
    extra: tuple[str, ...] = ("--workers", str(WORKERS), "--window", "4")
    resumed: tuple[str, ...] = ("--workers", str(WORKERS))
    study: Path = STUDY
    name: str = "tiny"
    work: Work = Work()
    begun: Mapping[str, Any] | None = None  # what the study is written down with before the first command, if it is
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
        if self.begun is not None and not self.home.exists():
            begin(Home(self.home), reference=str(self.study), **self.begun)
        return self.start("run", "--study", str(self.study), "--trials", str(self.trials), *self.extra)

    def resume(self) -> subprocess.Popen[str]:
        return self.start("resume", "--study", self.name, *self.resumed)

    def finished(self, process: subprocess.Popen[str], code: int = 0, timeout: float = SECONDS) -> str:
        output, _ = process.communicate(timeout=timeout)
        assert process.returncode == code, f"exit code {process.returncode}, not {code}:\n{output}"
        return output

    def says(self, *command: str) -> str:
        """What a command prints that only reads, run by this process."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SADeprecationWarning)  # of MLflow's own doing
            ran = CliRunner().invoke(app, [*command, "--study", self.name, "--home", str(self.home)])
        assert ran.exit_code == 0, (ran.output, ran.exception)
        return ran.output

    def status(self) -> dict:
        return json.loads(self.says("status", "--json"))

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

    def glance(self, statement: sa.Select) -> list[tuple]:
        """As `query`, but so cheap that it can be asked a hundred times a second; values are as SQLite holds them."""
        text = str(statement.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True}))
        try:
            with closing(sqlite3.connect(f"file:{self.home}/ledger.db?mode=ro", uri=True)) as connection:
                return connection.execute(text).fetchall()
        except sqlite3.OperationalError:  # no such file, or no such table yet
            return []

    def writable(self) -> bool:
        """Takes the ledger's write lock and lets it go again; False where another process keeps it for 0.1 s."""
        connection = sqlite3.connect(self.home / "ledger.db", timeout=0.1, isolation_level=None)
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


def shared_golden(factory: pytest.TempPathFactory, label: str, *extra: str, **of: Any) -> Golden:
    """The golden run of this label, made once for all processes that share the tests."""
    return Golden(**once(factory, label, lambda directory: asdict(golden_run(directory / "home", *extra, **of))))


def wait_until(
    what: Callable[[], T], process: subprocess.Popen[str], seconds: float = SECONDS, pause: float = 0.05
) -> T:
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
    wait_until(lambda: run.glance(select(attempts.c.fence).limit(1)), process, pause=0.01)


def pid_of(target: str, run: Run, driver: subprocess.Popen[str], rng: random.Random) -> int | None:
    """The pid of the driver, of a live worker, of a program that one runs, of the mirror, or of the process that
    workers are forked from; None if there is none at the moment."""
    if target == "driver":
        return driver.pid
    children = psutil.Process(driver.pid).children(target == "program") if driver.poll() is None else []
    if target == "program":
        programs = [child.pid for child in children if _is_program(child)]
        return rng.choice(programs) if programs else None
    module = {
        "worker": "hpo.workers.worker",
        "mirror": "hpo.tracking.mirror_process",
        "prepared": "hpo.workers.prepared",
    }[target]
    pids = sorted(child.pid for child in children if runs(child, module))
    return rng.choice(pids) if pids else None


def _is_program(process: psutil.Process) -> bool:
    """Whether it runs the script of a command's study itself, and does not only watch who does."""
    return _words(process)[1:2] in ([program] for program in PROGRAMS)


def _words(process: psutil.Process) -> list[str]:
    """Its command line; empty once it has died."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def check_sound(run: Run, golden: str, lost: int) -> None:
    """Everything that must hold once an interrupted study has ended, `lost` of whose workers were killed."""
    status = run.status()
    assert status["state"] == "complete"
    assert status["digest"] == golden
    rows = run.query(select(trials.c.told, trials.c.state))
    told = sorted(place for place, state in rows if state != "paused")
    assert len(rows) == run.trials and told == list(range(len(told))), "every trial that has ended is told once"
    trained = len(run.home.with_suffix(".steps").read_text().split())
    due = run.work.each_epoch * sum(epochs for (epochs,) in run.query(select(trials.c.epoch - trials.c.from_epoch)))
    retrained = trained - due
    assert 0 <= retrained <= lost * run.work.lost, f"{retrained} {run.work.what} were trained again"
    verified = run.says("verify")
    assert "differs" not in verified and "behind" not in verified, verified
    seen = {what: int(count) for count, what in re.findall(r"(\d+) (runs|points)", verified)}
    [(values,)] = run.query(select(func.count()).select_from(reports))
    assert seen["runs"] == run.trials + 1 and seen["points"] >= values > 0, f"MLflow has not got all: {verified}"


def gone(pids: list[int], seconds: float = 15.0) -> bool:
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
        reported = run.glance(OF_THE_TASK)
        if reported and reported[0][0] >= values and (pid := pid_of(target, run, driver, rng)) is not None:
            return pid
        time.sleep(0.01)


def stop_in_a_trial(run: Run, *condition: sa.ColumnElement[bool]) -> tuple[int, int, int]:
    """SIGSTOP a worker that has reported and saved in its trial: its pid, the trial, the attempt's fence.

    It holds no write lock then: everybody would wait for a lock whose holder is stopped, and lose their leases.
    """
    a = attempts.c
    wrote = [exists().where(t.c.trial_id == a.trial_id, t.c.fence == a.fence) for t in (reports, checkpoints)]
    busy = select(workers.c.pid, a.trial_id, a.fence).join(attempts).where(a.outcome.is_(None), *wrote, *condition)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for pid, trial_id, fence in run.glance(busy):
            os.kill(pid, signal.SIGSTOP)
            if (pid, trial_id, fence) in run.glance(busy) and run.writable():
                return pid, trial_id, fence
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.02)
    raise AssertionError("no worker has reported and saved anything")


def _killed(pid: int) -> bool:
    """Kill it; False where it has ended by itself, as a program does with its trial."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def kill_at(run: Run, shares: Mapping[str, float], golden: Golden, rng: random.Random) -> str:
    """Run, SIGKILL each target at its share of the way from first claim to last tell, end the study; where they fell.

    The way is measured in reported values, so a kill falls however fast the machine is. A study as short as this one
    is nearly over when a mirror that begins cold has imported MLflow, so its run is made slower; how long a step takes
    does not enter the digest. Where the study ends all the same before a kill, another one is killed earlier. The
    driver can only be the last target.
    """
    if "mirror" in shares and warm.cold:
        run.extra += ("-o", "pause=0.08")
    driver = run.run()
    first_claim(run, driver)
    falls = []
    for target, share in sorted(shares.items(), key=lambda item: item[1]):
        pid = wait_for_progress(run, driver, target, int(share * golden.values), rng)
        time.sleep(rng.random() * golden.seconds / golden.values * 10)  # between two reports as well as at one
        fell, [(told,)] = run.where(), run.query(select(func.count(trials.c.told)))
        if told == run.trials:
            assert share > 0.1, f"no kill falls between the first claim and the last tell: {fell}"
            run.finished(driver)
            run.home = run.home.with_name(f"{run.home.name}-again")
            return kill_at(run, {target: 0.8 * share for target, share in shares.items()}, golden, rng)
        falls.append(f"{target} at {share:.3f} of the way: {fell}")
        children = [pid for (pid,) in run.query(select(workers.c.pid))]
        while not _killed(pid):
            pid = wait_for_progress(run, driver, target, 0, rng)
        if target == "driver":
            run.finished(driver, -signal.SIGKILL)
            assert gone(children), "workers outlive their driver"
            driver = run.resume()
    run.finished(driver)
    return "; ".join(falls)


def kill_at_points(run: Run, points: Mapping[str, int]) -> int:
    """Run, and resume as often as the driver dies, with a SIGKILL at the n-th passing of each point; the workers lost.

    Each point kills one process, in whichever run of the driver it is passed so often.
    """
    run.extra += AT_ONCE
    fired = run.home.with_suffix(".fired")
    fired.mkdir()
    kills = ";".join(f"{name}=kill@{hit}" for name, hit in points.items())
    run.environ |= {"HPO_TESTING": "1", "HPO_FAILPOINTS": kills, "HPO_FAILPOINTS_FIRED": str(fired)}
    drivers = [name for name in points if name.startswith("driver.")]
    process = run.run()
    for _ in drivers:
        output = run.finished(process, -signal.SIGKILL)
        process = run.resume()
    output = run.finished(process)
    assert not (missed := [name for name in points if not (fired / name).exists()]), (
        f"{missed} were not passed: {output}"
    )
    return sum(LOST.get(name.partition(".")[0], 1) for name in points)
