"""`hpo ui --optuna`: beside a study that really runs, killed on the way, and what is refused."""

from __future__ import annotations

import importlib.util
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
from contextlib import closing, contextmanager
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

import hpo
from hpo.analysis.plots.dashboard import Export
from hpo.cli.main import app
from hpo.errors import UserError
from hpo.ledger import Ledger
from hpo.storage.home import Home
from hpo.tracking.ui import serve as ui
from hpo.tracking.ui.gate import token_of

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

STUDY = """
import time
from pathlib import Path
import hpo

@hpo.study(space={"x": hpo.Float(0.0, 1.0), "kind": hpo.Choice(["a", "b"])}, minimize="loss", num_epochs=2,
           strategy="none", sampler="random")
def slow(trial):
    for epoch in (1, 2):
        while trial.number > 1 and not Path(__file__).with_name("go").exists():
            time.sleep(0.05)
        trial.report(epoch, {"loss": trial.params.x / epoch})
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def pages(home: Home, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The pages of a home, once they answer."""
    server = ui.start_optuna(home, None, None, port)
    try:
        deadline = time.monotonic() + 120
        while not ui.answers("127.0.0.1", port):
            assert server.poll() is None and time.monotonic() < deadline, (home.logs / "ui.log").read_text()
            time.sleep(0.1)
        yield server
    finally:
        ui.halt(server)


def asked(home: Home, port: int, path: str, **request: Any) -> Any:
    headers = {"Authorization": f"Bearer {token_of(home)}"}
    question = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers, **request)
    with urllib.request.urlopen(question, timeout=30) as answer:
        return json.load(answer)


def shown(home: Home, port: int) -> list[dict[str, Any]]:
    """The trials that the dashboard has of the only study."""
    studies = asked(home, port, "/api/studies")["study_summaries"]
    return asked(home, port, f"/api/studies/{studies[0]['study_id']}")["trials"] if studies else []


def until(condition: Any) -> Any:
    deadline = time.monotonic() + 90
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


@pytest.mark.timeout(900)  # a driver and two servers, on a machine that may be busy
def test_the_pages_follow_a_running_study_and_survive_a_kill(tmp_path):
    file, home, port = tmp_path / "slow.py", Home.at(tmp_path / "home"), free_port()
    file.write_text(STUDY)
    line = [sys.executable, "-m", "hpo", "run", "--study", str(file), "--trials", "4", "--executor", "inline"]
    driver = subprocess.Popen([*line, "--home", str(home.root)], stdout=subprocess.DEVNULL)
    until(
        lambda: (
            (home.root / "ledger.db").exists()
            and CliRunner().invoke(app, ["status", "--home", str(home.root)]).exit_code == 0
        )
    )
    with pages(home, port) as server:
        until(lambda: [one["state"] for one in shown(home, port)][:3] == ["Complete", "Complete", "Running"])
        os.killpg(server.pid, signal.SIGKILL)
    file.with_name("go").touch()
    assert driver.wait(120) == 0
    with pages(home, port):
        until(lambda: {one["state"] for one in shown(home, port)} == {"Complete"})
        trials = shown(home, port)
        study = hpo.open("slow", home=home.root)
        assert [one["number"] for one in trials] == [0, 1, 2, 3], "no trial twice"
        for one in trials:
            ledger = study.trial(one["number"])
            assert one["values"] == [ledger["values"]["loss"]]
            curve = [(point["step"], point["value"]) for point in one["intermediate_values"]]
            assert curve == [(epoch, value) for _, epoch, value in ledger["curves"]["loss"]]
            params = {param["name"]: param["param_external_value"] for param in one["params"]}
            assert params["kind"] == ledger["params"]["kind"] and float(params["x"]) == ledger["params"]["x"]
        check_nothing_can_be_changed(home, port)


@pytest.mark.parametrize("number", ["SIGINT", "SIGHUP"])
def test_the_pages_end_with_the_command(tmp_path, number):
    """Ctrl-C, and a terminal that is closed."""
    home, port = Home.at(tmp_path / "home"), free_port()
    (tmp_path / "go").touch()
    (tmp_path / "slow.py").write_text(STUDY)
    line = ["run", "--study", str(tmp_path / "slow.py"), "--trials", "1", "--executor", "inline", "--home"]
    assert CliRunner().invoke(app, [*line, str(home.root)]).exit_code == 0
    command = [sys.executable, "-m", "hpo", "ui", "--optuna", "--home", str(home.root), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: ui.answers("127.0.0.1", port) and shown(home, port))
    servers = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, getattr(signal, number))
    process.wait(60)
    assert psutil.wait_procs(servers, timeout=60)[1] == []
    assert not [*home.root.glob("*optuna*")], "the export is in memory"


def exported(export: Export) -> dict[str, tuple[int, list[str]]]:
    """Name of each study -> its id, and the states of its trials."""
    storage = export.storage()
    return {
        study.study_name: (study._study_id, [one.state.name for one in storage.get_all_trials(study._study_id)])
        for study in storage.get_all_studies()
    }


def test_the_export_follows_the_ledger_and_keeps_the_ids_of_studies(tmp_path):
    home = Home.at(tmp_path / "home")
    (tmp_path / "go").touch()
    (tmp_path / "slow.py").write_text(STUDY)

    def searched(name: str, trials: int) -> None:
        hpo.run(str(tmp_path / "slow.py"), name=name, trials=trials, executor="inline", home=home.root, progress=False)

    searched("first", 1)
    with closing(Ledger(home.storage, create=False)) as ledger:
        export = Export(ledger, home)
        assert export.refresh() and not export.refresh()
        assert exported(export) == {"first": (0, ["COMPLETE"])}
        searched("second", 1)
        searched("first", 2)
        assert export.refresh()
        assert exported(export) == {"first": (0, ["COMPLETE"] * 2), "second": (1, ["COMPLETE"])}
        removed = CliRunner().invoke(app, ["rm", "--study", "first", "--yes", "--home", str(home.root)])
        assert removed.exit_code == 0, removed.output
        searched("first", 1)
        assert export.refresh()
        assert exported(export) == {"second": (1, ["COMPLETE"]), "first": (2, ["COMPLETE"])}
        only = Export(ledger, home, ["second"])
        assert only.refresh() and [*exported(only)] == ["second"]


def check_nothing_can_be_changed(home: Home, port: int) -> None:
    for method in ("POST", "PUT", "DELETE"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            asked(home, port, "/api/studies/1", method=method, data=b"{}")
        assert refused.value.code == 405
        refused.value.close()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/api/studies", timeout=30)
    assert refused.value.code == 401, "who brings no token sees nothing"
    refused.value.close()


def test_what_cannot_be_served_is_one_sentence(home, monkeypatch):
    said = CliRunner().invoke(app, ["ui", "--optuna", "--home", str(home.root)])
    assert said.exit_code == 2 and "holds no study" in said.stderr and not home.root.exists()
    Ledger(home.create().storage).close()
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "a2wsgi" else real(name, *rest)
    )
    with pytest.raises(UserError, match=r"need a2wsgi: pip install 'hpo\[dashboard\]'"):
        ui.start_optuna(home, None, None, free_port())
    monkeypatch.undo()
    with pytest.raises(UserError, match="not loopback"):
        ui.start_optuna(home, None, None, free_port(), "0.0.0.0")
