"""The SLURM script of the guide, on two nodes: processes of this machine with a host name each. Only `srun` is not the
real one: it takes the script's options and starts what they say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sqlalchemy import Select, select

from hpo.errors import HpoError
from hpo.ledger import Ledger
from hpo.ledger.tables import attempts, trials, workers

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "guide" / "study.sbatch"
ARRAY = SCRIPT.with_name("array.sbatch")
STUDY = ROOT / "tests" / "harness" / "tiny_study.py"
MAPPED = () if os.geteuid() == 0 else ("--map-root-user",)
NAMED = ["unshare", "--uts", *MAPPED, "bash", "-c", 'hostname "$0" && exec "$@"']  # a host name of its own

SRUN = """#!{python}
import os, signal, subprocess, sys
given = dict(word[2:].split("=") for word in sys.argv[1:] if word.startswith("--") and "=" in word)
assert given["nodes"] == given["ntasks"], given
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
first = int(given.get("relative") or os.environ["SLURM_ARRAY_TASK_ID"])
tasks = [subprocess.Popen([*{named!r}, f"node{{i}}", *command]) for i in range(first, first + int(given["nodes"]))]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture
def submit(tmp_path, postgres_database):
    """Starts a script as a job of two nodes would, or as a task of an array; gives the process."""
    if subprocess.run([*NAMED, "node0", "true"], capture_output=True).returncode:
        pytest.skip("runs as root, or wherever unshare --uts may name hosts")
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {
        "srun": SRUN.format(python=sys.executable, named=NAMED),
        "scontrol": f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol\n',
        "hpo": f'#!/bin/sh\nexec {sys.executable} -m hpo "$@"\n',
    }.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    environ = {"PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2"}
    environ |= {"HPO_HOME": str(tmp_path / "home"), "HPO_STORAGE": postgres_database()}
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, script: Path = SCRIPT, task: int | None = None) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command = ["bash", str(script), "--study", *(arguments if task is not None else (str(STUDY), *arguments))]
        given = environ if task is None else environ | {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(task)}
        started.append(subprocess.Popen(command, text=True, env=os.environ | given, start_new_session=True, **pipes))
        return started[-1]

    yield environ["HPO_STORAGE"], start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


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
    environ = {name: value for name, value in os.environ.items() if name != "HPO_STORAGE"} | {"HPO_HOME": "home"}
    ended = subprocess.run(["bash", str(SCRIPT), "--study", "mlp"], env=environ, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.endswith("HPO_STORAGE: the URL of a PostgreSQL that all nodes reach\n")


@pytest.mark.slow
def test_both_nodes_train_a_preempted_job_goes_on_and_all_of_it_ends(submit):
    storage, start = submit
    job, deadline = start("--trials", "6", "--window", "4", "-o", "pause=0.05"), time.monotonic() + 400
    hosts = select(workers.c.host).where(workers.c.id == attempts.c.worker_id)
    while {*found(storage, hosts)} < {("node0",), ("node1",)}:
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline, found(storage, hosts)
        time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=300)
    assert job.returncode > 0, output
    assert ("preempted",) in found(storage, select(attempts.c.outcome)), output
    assert "left: as it was told to" in output or "left: nothing it joined" in output
    job = start("--trials", "6", "--window", "4", "-o", "pause=0.05")
    output, _ = job.communicate(timeout=600)
    assert job.returncode == 0, output
    states = [state for (state,) in found(storage, select(trials.c.state))]
    assert len(states) == 6, output
    assert {*states} <= {"complete", "pruned"}, output


@pytest.mark.slow
def test_tasks_of_an_array_join_a_study_and_one_that_is_preempted_is_queued_again(submit, tmp_path):
    """Two tasks beside a driver on a node of its own; the second is told to leave in the middle of a trial."""
    storage, start = submit
    driver, deadline = start("--trials", "8", "--window", "4", "-o", "pause=0.05"), time.monotonic() + 400
    while not found(storage, select(trials.c.id)):
        assert driver.poll() is None and time.monotonic() < deadline, driver.communicate()
        time.sleep(0.2)
    tasks = [start("tiny", script=ARRAY, task=number) for number in (2, 3)]
    busy = select(workers.c.host).where(workers.c.id == attempts.c.worker_id, attempts.c.step >= 2)
    while not {("node2",), ("node3",)} <= {*found(storage, busy)}:
        assert driver.poll() is None and time.monotonic() < deadline, driver.communicate()
        time.sleep(0.2)
    tasks[1].send_signal(signal.SIGTERM)
    output, _ = tasks[1].communicate(timeout=300)
    assert "left: as it was told to" in output
    assert (tmp_path / "scontrol").read_text() == "requeue 7_3\n"
    output, _ = driver.communicate(timeout=600)
    assert driver.returncode == 0, output
    output, _ = tasks[0].communicate(timeout=300)
    assert (tasks[0].returncode, "left: nothing it joined is driven any more" in output) == (0, True), output
    states = [state for (state,) in found(storage, select(trials.c.state))]
    assert len(states) == 8 and {*states} <= {"complete", "pruned"}
