"""`hpo ui` answers and lists the runs; a real server that dies under a mirror and comes back has everything."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from mirrored import Made

from hpo import mirror, ui
from hpo.errors import HpoError, StorageError, UserError
from hpo.home import Home
from hpo.tracking.base import Unreachable
from hpo.tracking.mlflow import MlflowTracker
from hpo.verify import verify

# MLflow 3.17 with SQLAlchemy 2.1.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def drain(made: Made, uri: str, seconds: float = 30.0) -> mirror.DrainResult:
    tracker = MlflowTracker(uri, made.home.artifacts)
    result = mirror.drain(made.ledger, tracker, made.name, made.home, seconds=seconds)
    tracker.close()
    return result


def open_page(home: Home, port: int) -> subprocess.Popen[str]:
    """`hpo ui` as a process, once it answers."""
    command = [sys.executable, "-m", "hpo", "ui", "--home", str(home.root), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("MLflow's server is starting")
    assert f"http://{HOST}:{port}" in process.stdout.readline()
    return process


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Iterator[tuple[Made, int, subprocess.Popen[str]]]:
    """A home with one study, and `hpo ui` over it."""
    made = Made(Home.at(tmp_path_factory.mktemp("shown") / "home"))
    for _ in range(3):
        made.complete(2)
    assert drain(made, made.home.tracking_uri).behind == 0
    port = free_port()
    process = open_page(made.home, port)
    assert process.stdout is not None
    yield made, port, process
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(30)
    process.stdout.close()
    made.ledger.close()


def request(port: int, path: str, body: object = None, **headers: str) -> object:
    data = None if body is None else json.dumps(body).encode()
    url = f"http://{HOST}:{port}{path}"
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return json.load(answer)


def test_it_lists_the_runs_on_loopback_only(shown):
    made, port, _ = shown
    assert ui.answers(HOST, port)
    found = request(port, "/api/2.0/mlflow/experiments/get-by-name?experiment_name=s")
    experiment = found["experiment"]["experiment_id"]
    runs = request(port, "/api/2.0/mlflow/runs/search", {"experiment_ids": [experiment]})["runs"]
    assert {run["info"]["run_name"]: run["info"]["status"] for run in runs} == {
        "s": "SCHEDULED",
        "s-0000": "FINISHED",
        "s-0001": "FINISHED",
        "s-0002": "FINISHED",
    }
    with pytest.raises(urllib.error.HTTPError, match="403"):
        request(port, "/api/2.0/mlflow/experiments/search?max_results=1", Host="evil.test")
    with pytest.raises(UserError, match=f"port {port} on {HOST} is taken"):
        ui.start(made.home, made.home.tracking_uri, port)
    with pytest.raises(UserError, match="not loopback"):
        ui.start(made.home, made.home.tracking_uri, free_port(), "0.0.0.0")


def test_a_server_that_goes_and_comes_back(shown, tmp_path):
    """A study mirrored over HTTP: the server is killed in the middle, nothing is lost and nothing stands twice."""
    _, port, page = shown
    uri = f"http://{HOST}:{port}"
    made = Made(Home.at(tmp_path / "home"), "remote")
    made.ask()
    taken = made.claim()
    ref = made.checkpoint(taken, 1)
    made.report(taken, 1, {"val/loss": float("nan"), "up": float("inf")}, epoch=1, checkpoint=ref)
    made.artifact(taken, "a/notes.txt", "seen")
    assert drain(made, uri).behind == 0
    report = verify(made.home, made.home.storage, uri)
    assert (report.differences, report.counts["artifacts"]) == ([], 5)
    made.drop(taken, ref)
    made.report(taken, 2, {"val/loss": 1.0}, epoch=2, checkpoint=made.checkpoint(taken, 2))
    made.finish(taken, "complete", 1, [1.0])
    made.complete(2)
    os.killpg(children(page.pid)[0], signal.SIGKILL)
    assert page.wait(30) == 1  # it says that its server has ended
    result = drain_or_away(made, uri)
    assert result.behind == 3 + 5 and "cannot be used now" in result.why
    again = ui.start(shown[0].home, shown[0].home.tracking_uri, port)
    try:
        deadline = time.monotonic() + 120
        while not ui.answers(HOST, port) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert drain(made, uri).behind == 0
        report = verify(made.home, made.home.storage, uri)
        assert (report.differences, report.counts["runs"], report.behind) == ([], 3, 0)
        # Of the study 1; of trial 0 configuration, metrics, a file and a checkpoint; of trial 1 the first two.
        assert (report.counts["artifacts"], report.counts["models"]) == (1 + 5 + 2, 1)
    finally:
        ui.halt(again)
    assert not ui.answers(HOST, port)
    made.ledger.close()


def test_killed_it_leaves_no_server(shown):
    """SIGKILL of `hpo ui` itself: no process of its session is left, and the port is free."""
    made, port = shown[0], free_port()
    page = open_page(made.home, port)
    [leader] = children(page.pid)
    assert len(session(leader)) >= 3  # the leash, MLflow's command and its server
    page.kill()
    assert page.wait() == -signal.SIGKILL
    assert page.stdout is not None
    page.stdout.close()
    deadline = time.monotonic() + 30
    while session(leader) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert session(leader) == []
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
                return
            except OSError:  # a connection that some other process makes may have it for a moment
                if time.monotonic() > deadline:
                    raise
        time.sleep(0.5)


def session(leader: int) -> list[int]:
    """The live processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def drain_or_away(made: Made, uri: str) -> mirror.DrainResult:
    began = time.monotonic()
    try:
        return drain(made, uri, seconds=1.0)
    except Unreachable as error:  # it could not even be opened
        return mirror.DrainResult(0, mirror.behind(made.ledger, uri, made.name), str(error))
    finally:
        assert time.monotonic() - began < 10


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_what_cannot_be_served(tmp_path, monkeypatch):
    home = Home.at(tmp_path)
    with pytest.raises(UserError, match="there is nothing to show"):
        ui.serve(home, None, free_port())
    with pytest.raises(UserError, match="there is nothing to show"):
        ui.serve(Home.at(tmp_path / "nowhere"), None, free_port())
    with pytest.raises(UserError, match="the scheme 'htp' is not known"):
        ui.serve(home, "htp://x", free_port())
    (tmp_path / "mlflow.db").touch()
    (tmp_path / "logs").write_text("where the log's directory should be, as on a home that takes no changes")
    with pytest.raises(StorageError, match=r"ui\.log cannot be written"):
        ui.serve(home, None, free_port())
    (tmp_path / "mlflow.db").unlink()
    with pytest.raises(UserError, match="is a server already"):
        ui.serve(home, "http://127.0.0.1:5000", free_port())
    monkeypatch.setattr(ui.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HpoError, match=r"hpo\[ui\]"):
        ui.serve(home, None, free_port())
