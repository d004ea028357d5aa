"""A trial's ranks on two nodes, which are two processes of this host that meet on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import rank_runs
import torch

from trainer.config import ParallelConfig
from trainer.distributed.launch import RankLost, launch
from trainer.distributed.nodes import Meeting
from trainer.errors import ConfigError

pytestmark = pytest.mark.whole

TWO = ParallelConfig(data=2, timeout=120.0)
RUN = {"parallel": {"data": 2}, "num_epochs": 2}


def free() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def address() -> str:
    return free()


@pytest.fixture
def other(address, ranks) -> Iterator[subprocess.Popen[bytes]]:
    """The second node, there before the first."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, "-m", "rank_runs", address], env=environ)
    yield process
    process.kill()
    process.wait()


def launched(directory: Path, meeting: Meeting, **run: Any) -> Any:
    job = {"directory": str(directory), "runs": {"run": RUN | run}}
    return launch("rank_runs:runs", job, TWO, device="cpu", meeting=meeting)


def children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [p for p in psutil.Process(process.pid).children(recursive=True) if _is_rank(p)]


def _is_rank(process: psutil.Process) -> bool:
    try:
        return "trainer.distributed.rank" in process.cmdline()
    except psutil.NoSuchProcess:  # or one that has ended
        return False


@pytest.mark.usefixtures("ranks")
def test_two_nodes_train_as_one_process_does_one_launch_after_the_other(tmp_path, address, other):
    meeting, expected = Meeting(2, address), rank_runs.run(str(tmp_path / "alone"), num_epochs=2)
    for name in ("first", "second"):
        results = launched(tmp_path / name, meeting)
        losses = [rank_runs.losses_of(one["run"]) for one in results]
        torch.testing.assert_close(losses[0], rank_runs.losses_of(expected), rtol=1e-6, atol=0)
        assert torch.equal(*losses)
    assert children(other) == []


def while_it_trains(directory: Path, do: Any) -> threading.Thread:
    """Do it once the ranks of both nodes have trained an epoch."""

    def act() -> None:
        deadline = time.monotonic() + 100
        while not list(directory.glob("run/step-*/manifest.json")) and time.monotonic() < deadline:
            time.sleep(0.05)
        do()

    thread = threading.Thread(target=act)
    thread.start()
    return thread


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, "is not heard of any more"),
        pytest.param(signal.SIGSTOP, "has not been heard of for 5 s", marks=pytest.mark.slow),
    ],
)
def test_a_node_that_is_lost_is_named(tmp_path, address, other, monkeypatch, number, said):
    if number == signal.SIGSTOP:
        monkeypatch.setattr("trainer.distributed.launch.SILENT", 5.0)
    thread = while_it_trains(tmp_path, lambda: other.send_signal(number))
    with pytest.raises(RankLost, match=rf"^node 1 \(.*\) {said}\.$"):
        launched(tmp_path, Meeting(2, address), num_epochs=10_000)
    thread.join()


@pytest.mark.usefixtures("ranks")
def test_a_rank_of_another_node_that_dies_is_named_with_its_node(tmp_path, address, other):
    thread = while_it_trains(tmp_path, lambda: children(other)[0].kill())
    with pytest.raises(RankLost, match=r"^rank 1 \(pid \d+ of node 1 \(.*\)\) was killed by SIGKILL\.$"):
        launched(tmp_path, Meeting(2, address), num_epochs=10_000)
    thread.join()


@pytest.mark.slow
def test_asked_to_leave_on_either_node_all_ranks_save_and_go(tmp_path, address, other):
    asked = threading.Event()
    thread = while_it_trains(tmp_path, asked.set)
    job = {"directory": str(tmp_path), "runs": {"run": RUN | {"num_epochs": 10_000}}}
    meeting = Meeting(2, address)
    results = launch("rank_runs:runs", job, TWO, device="cpu", meeting=meeting, leaving=asked.is_set)
    thread.join()
    ended = [(one["run"]["outcome"]["kind"], one["run"]["outcome"]["step"]) for one in results]
    assert ended[0] == ended[1] and ended[0][0] == "preempted" and ended[0][1] > 0
    assert list(tmp_path.glob(f"run/step-{ended[0][1]:08d}.*"))


@pytest.mark.slow
def test_when_the_first_node_goes_the_others_end_and_wait_for_the_next(tmp_path, address, other):
    first = f"""
import runpy, pathlib
test = runpy.run_path({__file__!r})
test["launched"](pathlib.Path({str(tmp_path / "lost")!r}), test["Meeting"](2, {address!r}), num_epochs=10_000)
"""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, "-c", first], env=environ)
    while_it_trains(tmp_path / "lost", process.kill).join()
    process.wait()
    deadline = time.monotonic() + 40
    while children(other):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len(launched(tmp_path / "next", Meeting(2, address))) == 2


def test_what_cannot_be_is_refused(address):
    with pytest.raises(ConfigError, match="is no address: give the first node's host and a port"):
        Meeting(2, "node0")
    there = Meeting(2, address)
    with pytest.raises(ConfigError, match="cannot be listened at: Address already in use"):
        Meeting(2, address)
    del there
    with pytest.raises(ConfigError, match="3 ranks, which 2 nodes cannot share evenly: ask for a multiple of 2"):
        launch("rank_runs:runs", {}, ParallelConfig(data=3), device="cpu", meeting=Meeting(2, free()))
