"""`hpo ui` answers and lists the runs; a real server that dies under a mirror and comes back has everything."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mirrored import Made

from hpo.errors import HpoError, StorageError, UserError
from hpo.ledger import queries
from hpo.storage.home import Home
from hpo.tracking import mirror_process
from hpo.tracking.base import Unreachable
from hpo.tracking.mlflow.tracker import MlflowTracker
from hpo.tracking.pages import study_page
from hpo.tracking.ui import gate
from hpo.tracking.ui import serve as ui
from hpo.verify import verify

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]
HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def drain(made: Made, uri: str, seconds: float = 30.0) -> mirror_process.DrainResult:
    tracker = MlflowTracker(uri, made.home.artifacts)
    result = mirror_process.drain(made.ledger, tracker, made.name, made.home, seconds=seconds)
    tracker.close()
    return result


@contextmanager
def page(home: Home, port: int, *, soon: bool = False) -> Iterator[subprocess.Popen[str]]:
    """`hpo ui` as a process, once it answers; killed at the end if it still runs."""
    command = [sys.executable, "-m", "hpo", "ui", "--home", str(home.root), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not soon or "is starting" in line:  # which is said of what takes a second or more
            assert line.startswith("MLflow's server is starting")
            line = process.stdout.readline()
        assert f"http://{HOST}:{port}/?token={gate.token_of(home)} " in line
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def leash(page: subprocess.Popen[str]) -> int:
    """The process that leads the session of the page's server."""
    children = Path(f"/proc/{page.pid}/task/{page.pid}/children").read_text().split()
    [leader] = [
        int(pid) for pid in children if b"hpo.tracking.ui.supervise" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return leader


def request(home: Home, port: int, path: str, body: object = None, **headers: str) -> object:
    headers = {"Authorization": f"Bearer {gate.token_of(home)}", **headers}
    data = None if body is None else json.dumps(body).encode()
    url = f"http://{HOST}:{port}{path}"
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_home_is_shown_and_a_killed_server_costs_nothing(tmp_path, monkeypatch, killed):
    """`hpo ui` lists the runs of a home. Another study is mirrored over HTTP to its server, which is not there yet or
    is killed in the middle: once `hpo ui` is open nothing is lost and nothing is there twice. Killed itself, it leaves
    no server."""
    shown = Made(Home.at(tmp_path / "shown"))
    for _ in range(3):
        shown.complete(2)
    assert drain(shown, shown.home.tracking_uri).behind == 0
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", gate.token_of(shown.home))
    made, port = Made(Home.at(tmp_path / "home"), "remote"), free_port()
    if killed:
        with page(shown.home, port) as process:
            made.ask()
            mirror_some(made, f"http://{HOST}:{port}")
            os.killpg(leash(process), signal.SIGKILL)
            assert process.wait(60) == 1  # it says that its server has ended
        result = drain_or_away(made, f"http://{HOST}:{port}")
        assert result.behind == 3 + 5 and "does not answer now" in result.why
    else:
        made.ask()
        assert "does not answer now" in drain_or_away(made, f"http://{HOST}:{port}").why
    with page(shown.home, port) as process:
        check_best_first(process, shown.home, port)
        check_a_renamed_experiment_is_found(shown, port)
        check_runs_are_listed_on_loopback_only(shown.home, port)
        if not killed:
            mirror_some(made, f"http://{HOST}:{port}")
        check_nothing_is_lost(made, f"http://{HOST}:{port}")
        leader = leash(process)
        assert len(session(leader)) == 2  # the leash and MLflow's server
        process.kill()
        assert process.wait() == -signal.SIGKILL
        check_nothing_is_left(leader, port)
    for opened in (shown, made):
        opened.ledger.close()


def test_ctrl_c_while_the_server_starts_ends_both(tmp_path, empty_mlflow):
    home, port = Home.at(tmp_path / "home").create(), free_port()
    shutil.copyfile(empty_mlflow, home.root / "mlflow.db")
    command = [sys.executable, "-m", "hpo", "ui", "--home", str(home.root), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("MLflow's server is starting")
        leader = leash(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    check_nothing_is_left(leader, port)


def check_best_first(process: subprocess.Popen[str], home: Home, port: int) -> None:
    """The page named is of the study's trials in the view for training, whose order has the best one first."""
    assert process.stdout is not None
    line = process.stdout.readline()
    place = f"http://{HOST}:{port}/?token={gate.token_of(home)}#/experiments/1/runs"
    place += "?workflowType=machine_learning&viewStateShareKey=trials"
    assert line == f"  trials of s, best first: {place}\n"
    experiment = request(home, port, "/api/2.0/mlflow/experiments/get-by-name?experiment_name=s")["experiment"]
    [view] = [json.loads(tag["value"]) for tag in experiment["tags"] if "sharedViewState" in tag["key"]]
    order = [f"{view['orderByKey']} {'ASC' if view['orderByAsc'] else 'DESC'}"]
    body = {"experiment_ids": ["1"], "filter": view["searchFilter"], "order_by": order}
    runs = request(home, port, "/api/2.0/mlflow/runs/search", body)["runs"]
    found = [{one["key"]: one["value"] for one in run["data"]["metrics"]}["objective"] for run in runs]
    assert len(found) == 3 and found == sorted(found)


def check_a_renamed_experiment_is_found(shown: Made, port: int) -> None:
    token = gate.token_of(shown.home)
    with shown.ledger.read() as connection:
        study = queries.study_row(connection, "s")
    before = study_page(f"http://{HOST}:{port}", study, token)
    for name in ("digits, May", "s"):
        request(shown.home, port, "/api/2.0/mlflow/experiments/update", {"experiment_id": "1", "new_name": name})
        assert study_page(f"http://{HOST}:{port}", study, token) == before


def check_runs_are_listed_on_loopback_only(home: Home, port: int) -> None:
    assert ui.answers(HOST, port)
    found = request(home, port, "/api/2.0/mlflow/experiments/get-by-name?experiment_name=s")
    experiment = found["experiment"]["experiment_id"]
    runs = request(home, port, "/api/2.0/mlflow/runs/search", {"experiment_ids": [experiment]})["runs"]
    assert {run["info"]["run_name"]: run["info"]["status"] for run in runs} == {
        "s": "SCHEDULED",
        "s-0000": "FINISHED",
        "s-0001": "FINISHED",
        "s-0002": "FINISHED",
    }
    for refused in ({"Host": "evil.test"}, {"Origin": "http://evil.test"}):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            request(home, port, "/api/2.0/mlflow/experiments/search?max_results=1", **refused)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        request(home, port, "/api/2.0/mlflow/experiments/search?max_results=1", Authorization="Bearer of-another")
    with pytest.raises(UserError, match=f"port {port} on {HOST} is taken"):
        ui.start(home, home.tracking_uri, port)
    with pytest.raises(UserError, match="not loopback"):
        ui.start(home, home.tracking_uri, free_port(), "0.0.0.0")


def mirror_some(made: Made, uri: str) -> None:
    """Mirror a trial that waits as it trains, and let there be more of it, and of another one, than the server has."""
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


def check_nothing_is_lost(made: Made, uri: str) -> None:
    assert drain(made, uri).behind == 0
    report = verify(made.home, made.home.storage, uri)
    assert (report.differences, report.counts["runs"], report.behind) == ([], 3, 0)
    # Of the study 1; of trial 0 configuration, metrics, a file and a checkpoint; of trial 1 the first two.
    assert (report.counts["artifacts"], report.counts["models"]) == (1 + 5 + 2, 1)


def check_nothing_is_left(leader: int, port: int) -> None:
    """No process of the session is left, and the port is free."""
    deadline = time.monotonic() + 30
    while session(leader) and time.monotonic() < deadline:
        time.sleep(0.05)
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


SERVER = """
async def app(scope, receive, send):
    if scope["type"] == "http":
        status = 200 if scope["path"] == "/health" else 404
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})
"""
CONSTANTS = """
BACKEND_STORE_URI_ENV_VAR = REGISTRY_STORE_URI_ENV_VAR = ARTIFACT_ROOT_ENV_VAR = "A"
ARTIFACTS_DESTINATION_ENV_VAR = SERVE_ARTIFACTS_ENV_VAR = "B"
"""


@pytest.fixture
def healthy(tmp_path, monkeypatch) -> None:
    """In MLflow's place a server that starts at once."""
    server = tmp_path / "path" / "mlflow" / "server"
    server.mkdir(parents=True)
    for file in (server.parent / "__init__.py", server / "__init__.py"):
        file.touch()
    (server / "fastapi_app.py").write_text(SERVER)
    (server / "constants.py").write_text(CONSTANTS)
    (server / "handlers.py").write_text("def initialize_backend_stores(*_): pass")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))


@pytest.mark.usefixtures("healthy")
def test_a_server_that_is_killed_ends_its_page(tmp_path):
    home = Home.at(tmp_path / "home").create()
    (home.root / "mlflow.db").touch()
    with page(home, free_port(), soon=True) as process:
        os.killpg(leash(process), signal.SIGKILL)
        assert process.wait(60) == 1  # it says that its server has ended


@pytest.mark.usefixtures("healthy")
def test_a_server_is_halted_with_all_of_its_processes(tmp_path):
    home, port = Home.at(tmp_path / "home").create(), free_port()
    (home.root / "mlflow.db").touch()
    server = ui.start(home, home.tracking_uri, port)
    try:
        deadline = time.monotonic() + 120
        while not ui.answers(HOST, port):
            assert server.poll() is None and time.monotonic() < deadline, (home.logs / "ui.log").read_text()
            time.sleep(0.05)
        assert len(session(server.pid)) == 2  # the leash and the server
    finally:
        ui.halt(server)
    assert not ui.answers(HOST, port)
    check_nothing_is_left(server.pid, port)


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


def drain_or_away(made: Made, uri: str) -> mirror_process.DrainResult:
    began = time.monotonic()
    try:
        return drain(made, uri, seconds=1.0)
    except Unreachable as error:  # it could not even be opened
        return mirror_process.DrainResult(0, mirror_process.behind(made.ledger, uri, made.name), str(error))
    finally:
        assert time.monotonic() - began < 10


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
    with pytest.raises(HpoError, match=r"pip install 'hpo\[ui\]'"):
        ui.serve(home, None, free_port())
