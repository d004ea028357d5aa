"""Trials and what they start see neither the ledger's URL nor a password."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import sqlalchemy as sa
from environ_study import SEEN
from places import ROOT

from hpo.ledger import Ledger
from hpo.secret_environment import NAMES, withheld, without

STUDY = ROOT / "tests" / "helpers" / "environ_study.py"
CANARY = "c4nary5ecret"


def test_variables_are_gone_within_the_block_and_back_after_it(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, CANARY)
    with withheld():
        assert not {*NAMES} & os.environ.keys()
        assert CANARY not in subprocess_environ()
    assert {os.environ[name] for name in NAMES} == {CANARY}
    assert without({"HPO_STORAGE": "x", "PATH": "y"}) == {"PATH": "y"}


def subprocess_environ() -> str:
    return subprocess.run(["env"], capture_output=True, text=True, check=True).stdout


@pytest.mark.usefixtures("process")
@pytest.mark.skipif(sys.platform != "linux", reason="runs where /proc shows the memory of an environment")
def test_the_memory_a_process_was_started_with_holds_no_password():
    look = "open('/proc/self/environ', 'rb').read().split(b'\\0')"
    program = (
        f"from hpo.secret_environment import withheld\nwith withheld(): print([v for v in {look} if v])\nprint({look})"
    )
    environ = {"AFTER": "stays", "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
    environ = {"BEFORE": "stays", **dict.fromkeys(NAMES, CANARY), **environ}
    seen = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert "b'BEFORE=stays'" in seen.stdout and "b'AFTER=stays'" in seen.stdout
    assert CANARY not in seen.stdout


def test_the_password_of_the_environment_joins_the_url_of_a_server(monkeypatch, postgres_database):
    url = postgres_database()  # of a user without a password
    monkeypatch.setenv("PGPASSWORD", CANARY)
    ledger = Ledger(url)
    assert sa.make_url(ledger.url).query["password"] == CANARY and CANARY not in ledger.shown
    ledger.close()
    own = sa.make_url(url).set(password="own").render_as_string(hide_password=False)
    ledger = Ledger(own)
    assert ledger.url == own
    ledger.close()


@pytest.mark.whole
@pytest.mark.usefixtures("ranks")
@pytest.mark.skipif(sys.platform != "linux", reason="runs where /proc shows the memory of an environment")
@pytest.mark.parametrize(
    ("study", "executor", "flags", "processes"),
    [
        (":function", "inline", (), ["function"]),
        (":function", "local", (), ["function"]),
        pytest.param("", "local", (), ["task"], marks=pytest.mark.slow),
        ("", "local", ("-o", "train.parallel.data=2"), ["rank", "rank"]),
    ],
    ids=["function-inline", "function-local", "task-local", "ranks"],
)
def test_trials_and_their_children_see_no_password(tmp_path, postgres_database, study, executor, flags, processes):
    url = sa.make_url(postgres_database()).set(password=CANARY).render_as_string(hide_password=False)
    (tmp_path / "seen").mkdir()
    secret = dict.fromkeys({*NAMES} - {"HPO_TRACKING_URI"}, CANARY) | {"HPO_STORAGE": url}
    command = ["run", "--study", f"{STUDY}{study}", "--trials", "1", "--executor", executor, "--strategy", "none"]
    ran = subprocess.run(
        [sys.executable, "-m", "hpo", *command, *flags, "--home", str(tmp_path / "home")],
        env=os.environ | secret | {SEEN: str(tmp_path / "seen"), "HPO_COLD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout
    files = sorted((tmp_path / "seen").iterdir())
    assert [file.name.partition("-")[0] for file in files] == processes
    for file in files:
        seen = json.loads(file.read_text())
        assert SEEN in seen["variables"] and SEEN in seen["memory"] and SEEN in seen["child"]
        assert CANARY not in file.read_text()
        assert not {*NAMES} & seen["variables"].keys()
