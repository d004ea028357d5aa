"""The SLURM scripts of the guide under a real SLURM: its daemons on this machine, as nodes that have a CPU, a host name
and processes of their own each."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from places import ROOT
from sqlalchemy import Select, select

from hpo.errors import HpoError
from hpo.ledger import Ledger
from hpo.ledger.database.tables import attempts, trials, workers

pytestmark = pytest.mark.whole

SCRIPT = ROOT / "docs" / "guide" / "study.sbatch"
ARRAY = SCRIPT.with_name("array.sbatch")
STUDY = ROOT / "tests" / "harness" / "tiny_study.py"
NODES = ("node0", "node1", "node2", "node3")
BOUND = ["setpriv", "--pdeathsig", "KILL"]  # dies with the tests, and so does all that is apart
APART = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]  # a host as far as processes see it
HOST = [*APART, "bash", "-c", 'hostname "$0" && "$@"; exit']

# A job that is queued again waits for as long as a credential is valid.
CONFIGURATION = """\
ClusterName=test
SlurmUser=root
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthInfo=socket={directory}/munge.socket,cred_expire=10
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
OverTimeLimit=UNLIMITED
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 GraceTime=300
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


def asked(*command: str, **options) -> str:
    """What a command prints; it must succeed."""
    ended = subprocess.run(command, capture_output=True, text=True, **options)
    assert ended.returncode == 0, (command, ended.stderr)
    return ended.stdout


def wait_until(condition: Callable[[], object], shown: Callable[[], object] = str, seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, shown()
        time.sleep(0.2)


def configured(directory: Path) -> str:
    """The configuration, on ports that nobody has."""
    with ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in ("controller", *NODES)]
        port, *ports = [one.getsockname()[1] for one in free]
    text = CONFIGURATION.format(host=socket.gethostname().split(".")[0], port=port, directory=directory)
    nodes = zip(NODES, ports, strict=True)
    return text + "".join(f"NodeName={node} NodeAddr=127.0.0.1 Port={port} CPUs=1\n" for node, port in nodes)


@pytest.fixture(scope="module")
def slurm(process) -> Iterator[None]:
    """A SLURM for the commands that this process runs."""
    if not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch"))):
        pytest.skip("runs as root after `apt-get install slurmctld slurmd slurm-client munge`")
    if os.geteuid() or subprocess.run([*HOST, "node0", "true"], capture_output=True).returncode:
        pytest.skip("runs as root where `unshare --uts --pid --mount-proc` may be had")
    directory = Path(tempfile.mkdtemp(prefix="hpo-slurm-"))  # open to all and short, as sockets want it
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)

        def start(name: str, *command: str) -> None:
            log = stack.enter_context(open(directory / f"{name}.log", "w"))
            daemon = stack.enter_context(subprocess.Popen([*BOUND, *command], stdout=log, stderr=log))
            stack.callback(daemon.kill)

        directory.chmod(0o755)
        (directory / "state").mkdir()
        (directory / "munge.key").write_bytes(os.urandom(128))
        (directory / "munge.key").chmod(0o600)
        (directory / "slurm.conf").write_text(configured(directory))
        stack.enter_context(mock.patch.dict(os.environ, SLURM_CONF=str(directory / "slurm.conf")))
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        start("munged", "munged", "--foreground", *(f"--{option}={directory / file}" for option, file in files.items()))
        wait_until((directory / "munge.socket").exists, (directory / "munged.log").read_text, 60)
        start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            start(node, *HOST, node, "slurmd", "-D", "-N", node)
        idle = ["sinfo", "--noheader", "--states=idle", "--format=%D", "--partition=usual"]
        logs = list(directory.glob("*.log"))
        wait_until(
            lambda: subprocess.run(idle, capture_output=True, text=True).stdout == f"{len(NODES)}\n",
            lambda: [*map(Path.read_text, logs)],
            60,
        )
        yield


@dataclass(frozen=True)
class Job:
    """A job, or a task of an array."""

    id: str
    directory: Path

    def __getitem__(self, field: str) -> str:
        words = asked("scontrol", "show", "job", "--oneliner", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)[field]

    @property
    def output(self) -> str:
        file = self.directory / f"slurm-{self.id}.out"
        return file.read_text() if file.exists() else ""

    def wait(self, state: str) -> None:
        """Until it is in that state, and in no other that is the end."""
        wait_until(lambda: self["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), lambda: self.output)
        assert self["JobState"] == state, self.output

    def wait_for_restart(self) -> None:
        wait_until(lambda: self["Restarts"] == "1" or self["JobState"] == "FAILED", lambda: self.output)
        assert self["Restarts"] == "1", self.output


@pytest.fixture
def submit(slurm, tmp_path, postgres_database, monkeypatch):
    """Submits a script; gives the ledger's URL with it."""
    command = tmp_path / "bin" / "hpo"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m hpo "$@"\n')
    command.chmod(0o755)
    storage = postgres_database()
    for name, value in {
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "HPO_HOME": str(tmp_path / "home"),
        "HPO_STORAGE": storage,
    }.items():
        monkeypatch.setenv(name, value)

    def start(*arguments: str) -> Job:
        return Job(asked("sbatch", "--parsable", *arguments, cwd=tmp_path).strip(), tmp_path)

    yield storage, start
    for options in (["--full", "--signal=KILL"], []):  # what runs, and what waits
        subprocess.run(["scancel", "--user=root", *options], capture_output=True)
    wait_until(lambda: not asked("squeue", "--noheader"))


def found(storage: str, query: Select) -> list[tuple]:
    """What the ledger answers; nothing while there is none."""
    try:
        ledger = Ledger(storage, create=False)
    except HpoError:
        return []
    with ledger.read() as connection:
        rows = connection.execute(query).all()
    ledger.close()
    return [tuple(row) for row in rows]


@pytest.mark.usefixtures("process")
def test_a_job_without_a_common_ledger_is_refused():
    environ = {name: value for name, value in os.environ.items() if "HPO_STORAGE" not in name} | {"HPO_HOME": "home"}
    ended = subprocess.run(["bash", str(SCRIPT), "--study", "mlp"], env=environ, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.endswith("HPO_STORAGE_FILE: a file that holds the URL of a PostgreSQL that all nodes reach\n")


def test_a_job_of_two_nodes_runs_a_study(submit):
    storage, start = submit
    job = start(str(SCRIPT), "--study", str(STUDY), "--trials", "2", "--strategy", "none", "-o", "train.num_epochs=1")
    job.wait("COMPLETED")
    assert found(storage, select(trials.c.state)) == [("complete",)] * 2, job.output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_nodes_train_a_preempted_job_is_queued_again_and_goes_on(submit):
    storage, start = submit
    job = start(str(SCRIPT), "--study", str(STUDY), "--trials", "6", "--window", "4", "-o", "pause=0.05")
    wait_for_trials_on(storage, {"node0", "node1"}, job)
    start("--partition=urgent", f"--nodes={len(NODES)}", "--wrap=true")
    job.wait_for_restart()
    assert "left: as asked" in job.output or "left: none of its studies" in job.output
    job.wait("COMPLETED")
    check_all_went_on(storage, 6, job)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_is_told_that_its_time_will_be_up_and_is_queued_again(submit):
    storage, start = submit
    length = "--trials", "2", "--strategy", "none", "-o", "pause=1"  # of the study: longer than SLURM takes to look
    job = start("--time=5", str(SCRIPT), "--study", str(STUDY), *length)
    job.wait_for_restart()
    asked("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    job.wait("COMPLETED")
    assert found(storage, select(trials.c.state)) == [("complete",)] * 2, job.output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cancelled_job_saves_its_trials_and_goes_on_when_resubmitted(submit):
    storage, start = submit
    command = str(SCRIPT), "--study", str(STUDY), "--trials", "6", "--window", "4", "-o", "pause=0.05"
    job = start(*command)
    wait_for_trials_on(storage, {"node0", "node1"}, job)
    asked("scancel", job.id)
    job.wait("CANCELLED")
    assert job["Restarts"] == "0"
    job = start(*command)
    job.wait("COMPLETED")
    check_all_went_on(storage, 6, job)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_array_tasks_join_a_study_and_one_told_to_leave_is_requeued(submit):
    """Three tasks beside a driver on a node of its own; in the middle of a trial one is told to, and one cancelled."""
    storage, start = submit
    length = "--trials", "12", "--window", "6", "-o", "pause=0.05"
    driver = start("--nodes=1", str(SCRIPT), "--study", str(STUDY), *length)
    wait_until(lambda: found(storage, select(trials.c.id)), lambda: driver.output)
    array = start("--array=2-4", str(ARRAY), "--study", "tiny").id
    stays, told, cancelled = tasks = [Job(f"{array}_{number}", driver.directory) for number in (2, 3, 4)]
    wait_until(lambda: all(task["JobState"] == "RUNNING" for task in tasks))
    wait_for_trials_on(storage, {task["NodeList"] for task in tasks}, driver, step=2)
    asked("scancel", "--signal=TERM", told.id)
    asked("scancel", cancelled.id)
    told.wait_for_restart()
    cancelled.wait("CANCELLED")
    assert cancelled["Restarts"] == "0"
    assert "left: as asked" in told.output and "left: as asked" in cancelled.output
    driver.wait("COMPLETED")
    for task in (stays, told):
        task.wait("COMPLETED")
    assert "left: none of its studies is running" in stays.output
    check_all_went_on(storage, 12, driver)


def wait_for_trials_on(storage: str, nodes: set[str], job: Job, step: int = 0) -> None:
    busy = select(workers.c.host).where(workers.c.id == attempts.c.worker_id, attempts.c.step >= step)
    wait_until(lambda: {*found(storage, busy)} >= {(node,) for node in nodes}, lambda: job.output)
    assert job["JobState"] == "RUNNING", job.output


def check_all_went_on(storage: str, count: int, job: Job) -> None:
    """All trials have ended as they should, and what was stopped had saved itself."""
    states = [state for (state,) in found(storage, select(trials.c.state))]
    assert len(states) == count and {*states} <= {"complete", "pruned"}, job.output
    outcomes = [outcome for (outcome,) in found(storage, select(attempts.c.outcome))]
    assert "preempted" in outcomes and "lost" not in outcomes, outcomes
