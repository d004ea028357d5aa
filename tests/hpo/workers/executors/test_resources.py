"""What workers get of a host: devices are divided by pure functions, and the child's environment says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpo import load
from hpo.declaration import content
from hpo.driver.request import request_of
from hpo.driver.run import run
from hpo.errors import UserError
from hpo.storage.home import Home
from hpo.workers.executors.local import Local
from hpo.workers.executors.placement import Placement, PlacementRequest
from hpo.workers.executors.ray_cluster import Cluster, carried_environ, carry, check_reach
from hpo.workers.executors.resources import (
    Needs,
    Resources,
    container_memory,
    cpu_slots,
    devices,
    gpu_slots,
    gpus_each,
    memory_left,
    needs,
)

ONE_RANK = Needs(ranks=1, threads=1, gpu=True)


def test_devices_are_those_that_cuda_would_show(tmp_path):
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert devices({}, tmp_path) == ["0", "1"]
    assert devices({"CUDA_VISIBLE_DEVICES": "3,GPU-5f"}, tmp_path) == ["3", "GPU-5f"]
    assert devices({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert devices({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == []
    assert devices({"CUDA_VISIBLE_DEVICES": "1, MIG-7a,-1,2"}, tmp_path) == ["1", "MIG-7a"]
    assert devices({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, tmp_path) == []
    assert devices({}, tmp_path / "none") == []


def test_a_worker_has_its_own_gpu_or_an_equal_share():
    assert gpus_each(None, ONE_RANK, workers=4, present=4) == 1
    assert gpus_each(None, ONE_RANK, workers=5, present=4) == 0.5
    assert gpus_each(None, ONE_RANK, workers=2, present=0) == 0
    assert gpus_each(None, Needs(1, 1, gpu=False), workers=2, present=4) == 0
    assert gpus_each(None, Needs(4, 1, gpu=True), workers=2, present=8) == 4
    with pytest.raises(UserError, match=r"--gpus-per-worker 0.5: train.parallel asks for 4 ranks.*give 4, or 0"):
        gpus_each(0.5, Needs(4, 1, gpu=True), workers=2, present=8)


def test_gpus_are_divided_without_overlap_and_shares_have_their_memory():
    assert gpu_slots(2, 1, ["3", "5"]) == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "5"}]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in gpu_slots(2, 2, list("0123"))] == ["0,1", "2,3"]
    shared = gpu_slots(5, 0.5, list("012"))
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in shared] == ["0", "0", "1", "1", "2"]
    assert {slot["HPO_GPU_SHARE"] for slot in shared} == {"0.5"}
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in gpu_slots(4, 1 / 3, ["0", "1"])] == ["0", "0", "0", "1"]
    assert gpu_slots(2, 0, ["0"]) == [{}, {}]
    with pytest.raises(UserError, match="3 workers with 1 GPUs each need 3, and this host shows 2"):
        gpu_slots(3, 1, ["0", "1"])


def test_cpus_are_divided_without_overlap():
    assert cpu_slots(2, 2, [0, 1, 4, 5, 6]) == [[0, 1], [4, 5]]
    with pytest.raises(UserError, match="--cpus-per-worker 3: 2 workers need 6 CPUs, and 5 can be used here"):
        cpu_slots(2, 3, [0, 1, 4, 5, 6])
    with pytest.raises(UserError, match="binds no process to CPUs"):
        cpu_slots(1, 1, None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cpus": 0}, "--cpus-per-worker 0"),
        *(({"gpus": gpus}, "a part of one GPU") for gpus in (1.5, -1.0, float("inf"), float("nan"))),
    ],
)
def test_what_no_worker_can_have_is_refused(given, said):
    with pytest.raises(UserError, match=said):
        Resources(**given)


def test_a_cluster_where_nothing_listens_is_not_looked_for(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    said = r"^RAY_ADDRESS='127\.0\.0\.1:1': nothing listens there \(.*refused\): name a cluster's head\.$"
    with pytest.raises(UserError, match=said):
        Cluster()._connect(load("mlp"), 1)


def test_inline_has_all_that_is_here():
    with pytest.raises(UserError, match="with --executor inline: it has all"):
        PlacementRequest("inline", None, Resources(cpus=1)).with_defaults()


def test_a_resume_gives_workers_what_they_had_unless_told_otherwise():
    last = PlacementRequest("local", 2, Resources(cpus=1, gpus=0.5))
    assert PlacementRequest.of(last.with_defaults().to_json()) == last
    assert PlacementRequest().over(last) == last
    assert PlacementRequest(None, 4, Resources(gpus=1.0)).over(last) == PlacementRequest("local", 4, Resources(1, 1.0))
    assert PlacementRequest("ray").over(last) == PlacementRequest("ray")


def test_an_earlier_way_to_several_nodes_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("HPO_NODES", "2")
    with pytest.raises(
        UserError, match=r"^HPO_NODES has given way to torchrun: .* on each node `.*torchrun --nnodes=2 "
    ):
        PlacementRequest().with_defaults()


def test_all_workers_of_a_study_may_join_from_elsewhere():
    assert PlacementRequest("local", 0).with_defaults().workers == 0
    for executor in ("inline", "ray"):
        with pytest.raises(UserError, match="--workers 0: give 1 to "):
            PlacementRequest(executor, 0).with_defaults()


def test_a_study_needs_a_cpu_for_each_thread_of_each_rank():
    found = needs(load("mlp").configure({"train.parallel.data": 2, "train.num_threads": 3, "train.device": "cpu"}))
    assert found == Needs(ranks=2, threads=3, gpu=False)


@pytest.mark.usefixtures("process")
def test_a_local_worker_is_bound_to_its_cpus_and_sees_its_devices(tmp_path, monkeypatch):
    seen = tmp_path / "seen"
    says = "os.sched_getaffinity(0), os.environ['CUDA_VISIBLE_DEVICES']"
    waits = f"import os, time; time.sleep(0.5); print({says}, file=open({str(seen)!r}, 'w'))"

    def spawn(module, arguments, log, **environ):
        return subprocess.Popen([sys.executable, "-c", waits], env=os.environ | environ)

    monkeypatch.setattr("hpo.workers.executors.local.spawn", spawn)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    executor = Local(1, Resources(cpus=1, gpus=1.0))
    monkeypatch.setattr("hpo.workers.executors.pool.Ledger", lambda *_, **__: None)
    monkeypatch.setattr(executor, "_arguments", list)
    executor.start(_context(tmp_path))
    assert executor._workers[0].process.wait(60) == 0
    first = min(os.sched_getaffinity(0))
    assert seen.read_text() == f"{{{first}}} 7\n"


def _context(tmp_path):
    from hpo.workers.executors.base import WorkerContext

    return WorkerContext("sqlite://", Home(tmp_path), 1, "mlp", load("mlp"))


def test_a_ledger_that_other_hosts_cannot_reach_is_refused(tmp_path):
    import socket

    here = socket.gethostname()
    check_reach("sqlite:////ledger.db", {here}, "here:6379")
    check_reach("postgresql+psycopg://db/hpo", {here, "node1"}, "here:6379")
    with pytest.raises(UserError, match=r"nodes on other hosts \(node1\), and the ledger is a file of this one"):
        check_reach("sqlite:////ledger.db", {here, "node1"}, "here:6379")


@pytest.mark.usefixtures("process")
def test_a_study_file_is_carried_with_what_it_imports_from_beside_it(tmp_path, monkeypatch):
    source, target = tmp_path / "mine", tmp_path / "there"
    (source / "parts").mkdir(parents=True)
    (source / "parts" / "__init__.py").write_text("LOW = 0.25\n")
    (source / "left_out.py").write_text("")
    (source / "search.py").write_text(
        "from parts import LOW\nfrom pydantic import BaseModel\nfrom hpo import Float, Objective, Study\n"
        "class Config(BaseModel):\n    x: float = 0.5\n    model_config = {'frozen': True, 'extra': 'forbid'}\n"
        "class Task:\n    pass\n"
        "STUDY = Study('mine', Config(), Task, {'x': Float(LOW, 1.0)}, [Objective('loss', 'minimize')])\n"
    )
    study = load(str(source / "search.py"))
    assert carry(study, target) == source
    assert sorted(str(file.relative_to(target)) for file in target.rglob("*.py")) == ["parts/__init__.py", "search.py"]
    assert carry(load("mlp"), tmp_path / "nothing") is None
    monkeypatch.chdir(target)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | carried_environ(source)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    code = (
        f"import hpo; from hpo.declaration import content; study = hpo.load({study.reference!r}); "
        f"assert study.reference == {study.reference!r}; "
        f"print(content.code_sha256(study) == {content.code_sha256(study)!r})"
    )
    (source / "search.py").unlink()
    ran = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert ran.stdout == "True\n", ran.stderr


def test_ray_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--executor ray needs Ray: pip install 'hpo\[ray\]'"):
        PlacementRequest("ray").with_defaults()
    assert PlacementRequest("local").with_defaults().executor == "local", "which needs none"


def test_gpus_that_workers_cannot_have_are_refused_at_once(tmp_path, monkeypatch):
    """A Ray of this host has those of this host; a cluster may grow, but no rank does with a part of a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    ranks = {"train.parallel.data": 2, "train.device": "auto"}

    def asked(executor: str, gpus: float, **of) -> str:
        request = request_of(
            Home(tmp_path / "home"), "mlp", trials=1, executor=executor, workers=2, gpus_per_worker=gpus, **of
        )
        with pytest.raises(UserError) as error:
            run(request, lambda *_: lambda _: None)
        assert not (tmp_path / "home").exists()
        return str(error.value)

    said = "2 workers with 1 GPUs each need 2, and this host shows 1: ask for fewer"
    assert all(said in asked(executor, 1.0) for executor in ("local", "ray", "ray-tune"))
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    assert "--gpus-per-worker 0.5: train.parallel asks for 2 ranks" in asked("ray", 0.5, overrides=ranks)
    for executor in ("ray", "ray-tune"):
        Placement(executor, 2, Resources(gpus=1.0)).check(load("mlp"))


def test_the_memory_that_is_left_is_bounded_by_the_container(tmp_path):
    free = memory_left(tmp_path)
    assert free > 2**20 and container_memory(tmp_path) is None
    for name, text in {"memory.max": "1000", "memory.current": "900"}.items():
        (tmp_path / name).write_text(text)
    assert (container_memory(tmp_path), memory_left(tmp_path)) == ((1000, 900), 100)
    (tmp_path / "memory.max").write_text("max")
    assert container_memory(tmp_path) is None
