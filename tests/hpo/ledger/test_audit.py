"""The record of who did what, and `hpo log`, which shows it."""

from __future__ import annotations

import getpass
import json
import signal
import socket
import subprocess
import sys
from contextlib import closing

import pytest
from crafted import open_crafted, put_trial
from sqlalchemy import insert
from typer.testing import CliRunner

import hpo
from hpo.cli.main import app
from hpo.ledger import Ledger, audit, queries
from hpo.ledger.database import tables
from hpo.storage.home import Home

SECRET = "geheim"
YES = ("--yes", "--leave-mlflow")
OTHER = {"study": "crafted", "action": "run", "user": "ann", "host": "box", "command": "hpo run", "at": 5.0, "uid": "u"}
FUNCTION = """
import os
import signal

import hpo


@hpo.study(space={"x": hpo.Float(0.0, 1.0)}, minimize="loss")
def fit(trial):
    trial.report(1, {"loss": trial.params.x})
"""


@pytest.fixture
def at(tmp_path) -> Home:
    ledger = open_crafted(tmp_path / "ledger.db")
    put_trial(ledger, 0, "complete", (0.5,), fence=1)
    ledger.close()
    return Home.at(tmp_path)


def run(*words: str, home: Home) -> str:
    result = CliRunner().invoke(app, [*words, "--home", str(home.root)])
    assert result.exit_code == 0, result.output
    return result.stdout


def log(home: Home, *words: str) -> list[dict[str, object]]:
    return json.loads(run("log", "--json", *words, home=home))


def test_a_tag_and_a_removal_are_recorded_and_outlive_the_study(at, monkeypatch):
    assert log(at) == [] and run("log", home=at) == "nothing is recorded.\n"
    monkeypatch.setattr(sys, "argv", ["/bin/hpo", "tag", "0", "team=a b", "--storage", f"sqlite://u:{SECRET}@/x"])
    run("tag", "0", "team=a b", home=at)
    run("tag", "0", "team=a b", home=at)  # changes nothing
    monkeypatch.setattr(sys, "argv", ["/bin/hpo", "rm", "--study", "crafted"])
    run("rm", "--study", "crafted", "--yes", "--leave-mlflow", home=at)
    tagged, removed = log(at)
    who = {"study": "crafted", "user": getpass.getuser(), "host": socket.gethostname(), "role": None}
    assert {key: tagged[key] for key in who} == {key: removed[key] for key in who} == who
    assert (tagged["action"], removed["action"]) == ("tag", "rm") and tagged["at"] <= removed["at"]
    assert removed["command"] == "hpo rm --study crafted"
    assert str(tagged["command"]).startswith("hpo tag 0 'team=a b' --storage ") and SECRET not in str(tagged["command"])
    assert log(at, "--study", "other") == [] and log(at, "--last", "1") == [removed]
    lines = run("log", "--study", "crafted", home=at).splitlines()
    assert lines[1].endswith(f"{who['user']}@{who['host']}  rm crafted: hpo rm --study crafted")


@pytest.mark.parametrize("words", [["rm", *YES], ["rm", "0", *YES], ["promote", "0"]])
def test_what_somebody_else_began_is_left_alone(words, at):
    words = [*words, "--study", "crafted", "--home", str(at.root)]
    with closing(Ledger(at.storage)) as ledger:
        ledger.transact(lambda c: c.execute(insert(tables.audit).values(OTHER | {"at": -1.0, "uid": "before"})))
        with ledger.read() as connection:  # an earlier study of that name does not count
            audit.check_owner(connection, queries.study_row(connection, "crafted"), as_owner=False)
        ledger.transact(lambda c: c.execute(insert(tables.audit).values(OTHER)))
    refused = CliRunner().invoke(app, words)
    me = getpass.getuser()
    assert refused.exit_code == 2 and refused.stderr == (
        f"error: study 'crafted' was begun by ann, and you are {me}: ask, then repeat the command with --as-owner.\n"
    )
    if words[0] == "rm":
        assert CliRunner().invoke(app, [*words, "--dry-run"]).exit_code == 0
        assert CliRunner().invoke(app, [*words, "--as-owner"]).exit_code == 0


def test_an_entry_is_written_once_however_often_its_transaction_is_made(at):
    entry = audit.Entry("crafted", "stop")
    with closing(Ledger(at.storage)) as ledger:
        for _ in range(2):
            ledger.transact(entry.write)
        with ledger.read() as connection:
            assert [row.action for row in audit.entries(connection, None, 9)] == ["stop"]


@pytest.mark.whole
def test_a_run_and_its_continuation_are_recorded_with_the_caller(tmp_path, monkeypatch):
    file, home = tmp_path / "fit.py", Home.at(tmp_path / "home")
    file.write_text(FUNCTION)
    monkeypatch.setattr(sys, "argv", ["/bin/hpo", "run", "--trials", "1"])
    run("run", "--study", str(file), "--trials", "1", "--executor", "inline", home=home)
    hpo.run(str(file), trials=2, home=home.root, executor="inline", progress=False)
    recorded = [(entry["action"], entry["study"], entry["command"]) for entry in log(home)]
    assert recorded == [("run", "fit", "hpo run --trials 1"), ("resume", "fit", "Python, in /bin/hpo")]


@pytest.mark.whole
def test_a_run_that_a_signal_ends_is_recorded_as_stopped(tmp_path, process):
    (tmp_path / "fit.py").write_text(FUNCTION + "    os.kill(os.getpid(), signal.SIGTERM)\n")
    words = ["run", "--study", str(tmp_path / "fit.py"), "--trials", "3", "--executor", "inline"]
    command = [sys.executable, "-m", "hpo", *words, "--home", str(tmp_path / "home")]
    assert subprocess.run(command, capture_output=True, timeout=240).returncode == 128 + signal.SIGTERM
    began, stopped = log(Home.at(tmp_path / "home"))
    assert (began["action"], stopped["action"]) == ("run", "stop") and stopped["command"] == began["command"]


def test_a_server_names_the_role_that_wrote(postgres_database):
    with closing(Ledger(postgres_database())) as ledger:
        ledger.transact(audit.Entry("s", "run").write)
        with ledger.read() as connection:
            [row] = audit.entries(connection, "s", 1)
    assert row.role and row.user == getpass.getuser()
