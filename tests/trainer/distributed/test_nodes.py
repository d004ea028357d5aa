"""A trial's ranks on two nodes, which are two processes of this host that meet on loopback as torchrun has it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import rank_runs
import torch
from torch.distributed import HashStore

from trainer.config import ParallelConfig
from trainer.distributed.failures import NodeLost, RankLost
from trainer.distributed.launch import launch
from trainer.distributed.nodes import Nodes
from trainer.errors import ConfigError

pytestmark = pytest.mark.whole

TWO = ParallelConfig(data=2, timeout=120.0)
RUN = {"parallel": {"data": 2}, "num_epochs": 2}


def told(place: int, port: int, **more: str) -> dict[str, str]:
    """Returns what torchrun tells the process of a node, where the first one's process serves the store."""
    words = {"RANK": str(place), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return words | {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "run"} | more


@pytest.fixture
def port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextmanager
def node(port: int) -> Iterator[subprocess.Popen[bytes]]:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | told(1, port)
    process = subprocess.Popen([sys.executable, "-m", "rank_runs"], env=environ)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def other(port, ranks) -> Iterator[subprocess.Popen[bytes]]:
    """Yields the process of the second node."""
    with node(port) as process:
        yield process


@pytest.fixture
def nodes(port, other, monkeypatch) -> Nodes:
    """Returns this process's place, the first of two."""
    for name, value in told(0, port).items():
        monkeypatch.setenv(name, value)
    met = Nodes.of_torchrun()
    assert not [name for name in told(0, port) if name in os.environ], "ranks have numbers of their own"
    return met


def launched(directory: Path, nodes: Nodes, leaving: Callable[[], bool] = lambda: False, **run: Any) -> Any:
    job = {"directory": str(directory), "runs": {"run": RUN | run}}
    return launch("rank_runs:runs", job, TWO, device="cpu", nodes=nodes, leaving=leaving)


def children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children(recursive=True) if _is_rank(child)]


def _is_rank(process: psutil.Process) -> bool:
    try:
        return "trainer.distributed.rank" in process.cmdline()
    except psutil.NoSuchProcess:  # or one that has ended
        return False


def gone(process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + 10
    while children(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not children(process)


def test_two_nodes_train_as_one_process_does_one_launch_after_the_other(tmp_path, nodes, other):
    expected = rank_runs.run(str(tmp_path / "alone"), num_epochs=2)
    for name in ("first", "second"):
        results = launched(tmp_path / name, nodes)
        losses = [rank_runs.losses_of(result["run"]) for result in results]
        torch.testing.assert_close(losses[0], rank_runs.losses_of(expected), rtol=1e-6, atol=0)
        assert torch.equal(*losses)
        assert gone(other), "ranks end with their launch"
    assert nodes.lost == ""
    nodes.dismiss()
    assert nodes.read("node/1")["over"], "the store may be gone by the time at which the other would look again"
    assert other.wait(20) == 0


def while_it_trains(directory: Path, do: Callable[[], object]) -> threading.Thread:
    """Calls `do` once the ranks of both nodes have trained an epoch."""

    def act() -> None:
        deadline = time.monotonic() + 100
        while not list(directory.glob("run/step-*/manifest.json")) and time.monotonic() < deadline:
            time.sleep(0.05)
        do()

    thread = threading.Thread(target=act)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "is not heard of any more"),
        pytest.param(signal.SIGSTOP, "has not been heard of for 5 s", marks=pytest.mark.slow),
    ],
)
def test_a_node_that_is_lost_is_named(tmp_path, nodes, other, monkeypatch, number, said):
    """And the first one knows that it cannot go on without that node."""
    if number == signal.SIGSTOP:
        monkeypatch.setattr("trainer.distributed.nodes.SILENT", 5.0)
    thread = while_it_trains(tmp_path, lambda: other.send_signal(number))
    with pytest.raises(NodeLost, match=rf"^node 1 \(.*\) {said}\.$") as lost:
        launched(tmp_path, nodes, num_epochs=10_000)
    thread.join()
    assert nodes.lost == str(lost.value)


def test_a_node_that_does_not_come_is_named(tmp_path, nodes, other, monkeypatch):
    monkeypatch.setattr("trainer.distributed.nodes.STARTING", 1.0)
    other.kill()
    other.wait()
    with pytest.raises(NodeLost, match=r"^node 1, which has not come has not been heard of for 1 s\.$"):
        launched(tmp_path, nodes)


def test_a_rank_of_another_node_that_dies_is_named_and_the_nodes_go_on(tmp_path, nodes, other):
    thread = while_it_trains(tmp_path / "lost", lambda: children(other)[0].kill())
    with pytest.raises(RankLost, match=r"^rank 1 \(pid \d+ of node 1 \(.*\)\) was killed by SIGKILL\.$"):
        launched(tmp_path / "lost", nodes, num_epochs=10_000)
    thread.join()
    assert nodes.lost == ""
    assert len(launched(tmp_path / "next", nodes)) == 2


@pytest.mark.parametrize("where", ["first", pytest.param("other", marks=pytest.mark.slow)])
def test_asked_to_leave_on_either_node_all_ranks_save_and_go(tmp_path, nodes, other, where):
    asked = threading.Event()
    thread = while_it_trains(tmp_path, asked.set if where == "first" else other.terminate)
    results = launched(tmp_path, nodes, asked.is_set, num_epochs=10_000)
    thread.join()
    ended = [(result["run"]["outcome"]["kind"], result["run"]["outcome"]["step"]) for result in results]
    assert ended[0] == ended[1] and ended[0][0] == "preempted" and ended[0][1] > 0
    assert list(tmp_path.glob(f"run/step-{ended[0][1]:08d}.*"))
    assert ("leaves" in nodes.lost) == (where == "other"), "without that node no other trial can begin"
    assert nodes.wanted() == {}, "the other node ends its ranks"


@pytest.mark.slow
def test_when_the_first_node_goes_the_other_ends_its_ranks_and_fails(tmp_path, port, ranks):
    first = f"""
import runpy, pathlib
test = runpy.run_path({__file__!r})
test["launched"](pathlib.Path({str(tmp_path)!r}), test["Nodes"].of_torchrun(), num_epochs=10_000)
"""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | told(0, port)
    with node(port) as other:
        process = subprocess.Popen([sys.executable, "-c", first], env=environ)
        while_it_trains(tmp_path, process.kill).join()
        process.wait()
        ranks_of_other = children(other)
        assert other.wait(40) == 1
        _, alive = psutil.wait_procs(ranks_of_other, timeout=20)
        assert ranks_of_other and not alive


def test_what_an_earlier_first_node_wanted_is_not_begun_again():
    """The store may outlive the process of the first node: its successor clears what that one wanted."""
    store = HashStore()
    first, second = Nodes(0, 2, "127.0.0.1", 1, store), Nodes(1, 2, "127.0.0.1", 1, store)
    with first.launch({"world": 2, "nodes": 2}):
        assert second.wanted()["orders"]["world"] == 2
        Nodes(0, 2, "127.0.0.1", 1, store)
        assert second.wanted() == {}


def test_what_cannot_be_is_refused(port):
    with pytest.raises(ConfigError, match=r"torchrun has started 8 processes on this node: give --nproc-per-node=1"):
        Nodes.of_torchrun(told(0, port, LOCAL_WORLD_SIZE="8"))


def test_ranks_that_nodes_cannot_share_evenly_are_refused(nodes):
    with pytest.raises(ConfigError, match="3 ranks, which 2 nodes cannot share evenly: ask for a multiple of 2"):
        launch("rank_runs:runs", {}, ParallelConfig(data=3), device="cpu", nodes=nodes)
