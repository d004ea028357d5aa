"""A study whose trials have their ranks on two nodes: two torchruns of this host, killed in every way."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kill import Run, wait_until
from once import once
from sqlalchemy import select
from torchruns import Nodes, end
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.ledger.database.tables import attempts, reports, trials
from hpo.storage.home import Home

pytestmark = pytest.mark.whole

TRIALS = 3
RANKS = ("-o", "train.parallel.data=2", "-o", "train.micro_batch_size=3", "-o", "pause=0.01", "--seed", "1")
PACE = ("--window", "2", *RANKS)
SECONDS = 240


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path / "home", TRIALS, ("--workers", "0", *PACE))


@pytest.fixture
def nodes(run) -> Iterator[Nodes]:
    begun = Nodes(run.home)
    yield begun
    begun.end()
    sys.stderr.write(begun.said())  # which pytest shows of a test that fails


@pytest.fixture(scope="module")
def digest(tmp_path_factory, ranks) -> str:
    """Returns the digest of the study on one host."""

    def on_one_host(directory: Path) -> str:
        run = Run(directory / "home", TRIALS, ("--workers", "1", *PACE))
        run.finished(run.run(), timeout=SECONDS)
        return run.status()["digest"]

    return once(tmp_path_factory, "nodes", on_one_host)


def driven(run: Run) -> subprocess.Popen[str]:
    driver = run.run()
    wait_until(lambda: bool(run.query(select(trials.c.number))), driver)
    return driver


def wait_for_values(run: Run, more: int, driver: subprocess.Popen[str]) -> None:
    """Waits until the ledger has taken so many more values: the trial at hand is in the middle of something."""
    wanted = len(run.query(select(reports.c.value))) + more
    wait_until(lambda: len(run.query(select(reports.c.value))) >= wanted, driver)


def worker_of(torchrun: subprocess.Popen[bytes]) -> psutil.Process:
    """Returns the process that a torchrun has started, once there is one."""
    deadline = time.monotonic() + 30
    while not (children := psutil.Process(torchrun.pid).children()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return children[0]


def rank_of(torchrun: subprocess.Popen[bytes]) -> psutil.Process:
    return worker_of(torchrun).children()[0]


def check_whole(run: Run, driver: subprocess.Popen[str], digest: str) -> set[str]:
    """Waits for the study's end and holds it against the one of one host. Returns how its attempts ended."""
    run.finished(driver, timeout=SECONDS)
    assert run.status()["digest"] == digest
    run.finished(run.start("verify", "--study", "tiny"))
    return {outcome for (outcome,) in run.query(select(attempts.c.outcome))}


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_on_two_nodes_it_is_the_same_study(digest, run, nodes, shared):
    """A trial that is pruned ends on both at once, and both torchruns end with the study."""
    driver, nodes.shared = driven(run), shared
    torchruns = [nodes.begin(), nodes.begin()]
    assert check_whole(run, driver, digest) == {"complete", "pruned"}
    assert {ranks for (ranks,) in run.query(select(trials.c.ranks))} == {2}
    assert [torchrun.wait(60) for torchrun in torchruns] == [0, 0], nodes.said()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank here", "rank there", "worker", "follower"])
def test_a_process_that_is_killed_changes_nothing(digest, run, nodes, victim):
    driver = driven(run)
    first, second = nodes.begin(), nodes.begin()
    wait_for_values(run, 2, driver)
    process = {"rank here": (rank_of, first), "rank there": (rank_of, second), "worker": (worker_of, first)}
    find, node = process.get(victim, (worker_of, second))
    find(node).kill()
    assert "lost" in check_whole(run, driver, digest)
    assert [first.wait(60), second.wait(60)] == [0, 0], nodes.said()


@pytest.mark.slow
def test_a_node_that_leaves_gives_its_trial_back_to_another(digest, run, nodes):
    driver = driven(run)
    first, second = nodes.begin(), nodes.begin()
    wait_for_values(run, 2, driver)
    second.send_signal(signal.SIGTERM)
    second.wait(60)
    third = nodes.begin()
    assert "preempted" in check_whole(run, driver, digest)
    assert [first.wait(60), third.wait(60)] == [0, 0], nodes.said()


@pytest.mark.slow
def test_a_node_that_is_killed_is_replaced_by_another(digest, run, nodes):
    driver = driven(run)
    first, second = nodes.begin(), nodes.begin()
    wait_for_values(run, 2, driver)
    end(second)
    third = nodes.begin()
    assert "lost" in check_whole(run, driver, digest)
    assert [first.wait(60), third.wait(60)] == [0, 0], nodes.said()


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False])
def test_without_the_host_of_the_rendezvous_all_end_and_begin_again(digest, run, nodes, alone):
    """Whether its torchrun is killed alone or with the worker and the ranks."""
    driver = driven(run)
    first, second = nodes.begin(), nodes.begin()
    wait_for_values(run, 2, driver)
    left = psutil.Process(first.pid).children(recursive=True)
    if alone:
        first.kill()
        first.wait()
    else:
        end(first)
    assert second.wait(120) != 0
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not alive, "a worker dies with its torchrun, and its ranks with it"
    torchruns = [nodes.begin(), nodes.begin()]
    assert "lost" in check_whole(run, driver, digest)
    assert [torchrun.wait(60) for torchrun in torchruns] == [0, 0], nodes.said()


def test_the_earlier_command_says_the_line_that_replaces_it():
    said = CliRunner().invoke(app, ["node", "node0:29400", "--storage", "sqlite:///x.db"])
    assert said.exit_code == 2
    words = re.sub(r"\s+", " ", said.stderr)
    assert "hpo node has given way to torchrun" in words and "--no-python hpo worker --study NAME" in words


def test_several_processes_of_a_node_are_refused(run, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("hpo.workers.nodes.die_with", lambda parent: None)  # of this test's process
    refused = CliRunner().invoke(app, ["worker", "--home", str(run.home), "--storage", Home(run.home).storage])
    assert refused.exit_code == 2 and "has started 2 processes on this node: give --nproc-per-node=1" in refused.stderr
