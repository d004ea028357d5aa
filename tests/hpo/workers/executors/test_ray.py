"""`hpo run --executor ray` as a user runs it: a Ray of its own that leaves nothing, and a cluster that loses a node."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from kill import STUDY, Run, wait_until
from sqlalchemy import select

from hpo.errors import HpoError
from hpo.ledger.database.tables import attempts, trials, workers
from hpo.workers.executors.ray import _Worker
from trainer.errors import CheckpointError

pytestmark = pytest.mark.whole

PAUSE = ("-o", "pause=0.05")


@pytest.fixture
def scratch(monkeypatch):
    """Where this test's Ray keeps its files: short, since the names of sockets are."""
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", directory)
    yield Path(directory)
    shutil.rmtree(directory, ignore_errors=True)


def busy(run: Run) -> list[int]:
    """The workers that are in the middle of a trial, by pid."""
    query = select(workers.c.pid).join(attempts).where(attempts.c.outcome.is_(None), attempts.c.step >= 2)
    return [pid for (pid,) in run.query(query)]


def of(scratch: Path) -> list[psutil.Process]:
    """The processes that have anything to do with this test's Ray."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(scratch) in " ".join(process.cmdline()) or process.environ().get("RAY_TMPDIR") == str(scratch):
                found.append(process)
    return [process for process in found if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.usefixtures("ray_of")  # counts it among the tests of Ray, though it starts its own
@pytest.mark.parametrize("twice", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ctrl_c_leaves_no_process_of_ray_and_the_study_goes_on(tmp_path, scratch, twice):
    pause = ("-o", "pause=2") if twice else PAUSE  # longer than the second one takes to come
    run = Run(tmp_path / "home", trials=4, extra=("--executor", "ray", "--workers", "1", "--window", "4", *pause))
    process = run.run()
    [worker] = wait_until(lambda: busy(run), process)
    assert psutil.Process(worker).nice() == os.nice(0)
    os.killpg(process.pid, signal.SIGINT)
    if twice:
        assert process.stdout is not None
        assert any("once more stops at once" in line for line in process.stdout), "the first one was heard"
        os.killpg(process.pid, signal.SIGINT)
    output = run.finished(process, 130, timeout=240)
    assert ("stopped at once: `hpo resume --study tiny" if twice else "hpo resume --study tiny") in output
    deadline = time.monotonic() + 30
    while left := of(scratch):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    if twice:
        assert run.query(select(attempts.c.outcome)) == [(None,)], "nobody waited for the trial to be saved"
    else:
        assert not list(scratch.iterdir())
        assert {state for (state,) in run.query(select(trials.c.state))} >= {"waiting"}


def test_a_lost_actor_is_a_lost_worker_and_an_impossible_one_ends_the_run(ray_cluster):
    """Each kind as Ray itself raises it, or, what takes a failing machine, from a task of its."""
    import ray
    from ray import exceptions as lost
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    class Actor:
        def tell(self, error: Exception | None = None) -> int:
            if error is not None:
                raise error
            return 7

        def stay(self) -> None:
            time.sleep(600)

    def begun(**options) -> Any:
        return ray.remote(num_cpus=0, **options)(Actor).remote()  # type: ignore[call-overload]

    def code(actor: Any, error: Exception | None = None, ended: Any = None) -> int | None:
        worker = _Worker(actor, actor.tell.remote(), ended or actor.tell.remote(error))
        assert not ray.wait([worker.begun, worker.ended], num_returns=2, timeout=120)[1]
        return worker.code()

    ray.init(address=ray_cluster, log_to_driver=False, logging_level="ERROR")
    try:
        actor = begun()  # an error in one of its tasks leaves it as it is
        assert code(actor) == 7
        for error in (lost.OutOfMemoryError("memory"), lost.NodeDiedError("node"), lost.LocalRayletDiedError()):
            assert code(actor, error) == -signal.SIGKILL, error
        with pytest.raises(HpoError, match=r"could not begin .*OSError.*: OSError: no space left\)\.$"):
            code(actor, OSError("no space left"))
        with pytest.raises(CheckpointError, match="as it was"):
            code(actor, CheckpointError("as it was"))
        assert code(actor) == 7
        staying = actor.stay.remote()  # not a task told after the kill: Ray kills later than it returns
        ray.kill(actor)
        assert code(actor, ended=staying) == -signal.SIGKILL
        with pytest.raises(HpoError, match=r"could not begin in the Ray cluster \(ActorUnschedulableError: .*exist"):
            code(begun(scheduling_strategy=On("0" * 56, soft=False)))
        with pytest.raises(HpoError, match=r"could not begin in the Ray cluster \(RuntimeEnvSetupError: \S"):
            code(begun(runtime_env={"conda": "none-of-this-name"}))
    finally:
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_of")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("study", "count", "flags"),
    [
        (str(STUDY), 8, PAUSE),
        ("atft", 4, ("-o", "train.num_epochs=3", "--sampler", "random")),
    ],
    ids=["tiny", "atft"],
)
def test_a_study_whose_cluster_loses_a_node_is_the_uninterrupted_one(
    tmp_path, scratch, monkeypatch, study, count, flags
):
    """Three nodes of one CPU each; the one whose worker has trained for a while is killed with all its processes."""
    from ray.cluster_utils import Cluster

    told = ("run", "--study", study, "--trials", str(count), "--window", "4", *flags)
    alone = Run(tmp_path / "alone")
    alone.finished(alone.start(*told, "--executor", "local", "--workers", "2"), timeout=1200)
    (scratch / "ray").mkdir()  # where Ray notes the cluster that it has started
    sizes = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=sizes | {"temp_dir": str(scratch)})
    try:
        nodes = [cluster.add_node(**sizes) for _ in range(2)]
        run = Run(tmp_path / "home", environ={"RAY_ADDRESS": cluster.address})
        process = run.start(*told, "--executor", "ray", "--workers", "3")
        node, pid = wait_until(lambda: _on(nodes, busy(run)), process, 900)
        cluster.remove_node(node, allow_graceful=False)
        output = run.finished(process, timeout=1200)
        assert not psutil.pid_exists(pid)
        assert run.query(select(attempts.c.outcome).where(attempts.c.outcome == "lost")), output
    finally:
        cluster.shutdown()
    name = "atft" if study == "atft" else "tiny"
    status = _json(run, name)
    print(status["digest"], run.finished(run.start("verify", "--study", name)))
    assert (status["state"], status["digest"]) == ("complete", _json(alone, name)["digest"])
    assert re.match("0 differences", run.finished(run.start("verify", "--study", name)))


def _json(run: Run, name: str) -> dict:
    return json.loads(run.finished(run.start("status", "--study", name, "--json")))


def _on(nodes: list, pids: list[int]) -> tuple | None:
    """One of the nodes, and of the workers, whose actor it runs."""
    for node in nodes:
        [raylet] = node.all_processes["raylet"]
        below = {child.pid for child in psutil.Process(raylet.process.pid).children(recursive=True)}
        if found := below & set(pids):
            return node, found.pop()
    return None
