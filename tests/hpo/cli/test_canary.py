"""A password that a study is run with is found nowhere afterwards, whether servers answer or are away."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from rounds import rounds
from typer.testing import CliRunner

from hpo.child_process import spawn
from hpo.cli.main import app
from hpo.ledger.database.tables import metadata
from hpo.storage.home import Home
from hpo.tracking.ui import serve as ui

CANARY = "c4nary5ecret"
AWAY = "127.0.0.1:1"
STUDY = ["--study", "mlp", "--workers", "1", "--sampler", "random", "-o", "train.num_epochs=1"]


class Watch(threading.Thread):
    """Looks at the arguments of every process of this machine, again and again, until it is left."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.found: set[bytes] = set()
        self.looks, self._over = 0, threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.05):
            self.looks += 1
            for process in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    words = process.read_bytes()
                except OSError:  # it has ended
                    continue
                self.found |= {words} if CANARY.encode() in words else set()

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def hpo(*arguments: str, **environment: str) -> tuple[int, str]:
    """The exit code and all that a command prints; neither holds the canary."""
    ran = subprocess.run(
        [sys.executable, "-m", "hpo", *arguments], env=os.environ | environment, capture_output=True, text=True
    )
    said = ran.stdout + ran.stderr
    assert CANARY not in said, said
    assert "Traceback" not in said, said
    return ran.returncode, said


def found_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]


def rows_of(url: str) -> str:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        rows = [str(connection.execute(table.select()).all()) for table in metadata.sorted_tables]
    engine.dispose()
    return "\n".join(rows)


@pytest.mark.usefixtures("process")
def test_a_password_is_found_nowhere_after_a_whole_study(postgres_database, tmp_path):
    """The ledger lies on a server whose password is the canary; MLflow first in the home, then on one that is away."""
    storage = sa.make_url(postgres_database()).set(password=CANARY).render_as_string(hide_password=False)
    settings = {"HPO_STORAGE": storage, "HPO_HOME": str(tmp_path / "home")}
    away = settings | {"HPO_TRACKING_URI": f"http://me:{CANARY}@{AWAY}"}
    with Watch() as watch:
        assert hpo("run", *STUDY, "--trials", "1", **settings)[0] == 0
        code, said = hpo("resume", "--study", "mlp", "--trials", "2", **away)
        assert code == 0 and f"MLflow at http://{AWAY} does not answer now" in said
        assert hpo("sync", **away)[0] == 1
        assert "a server already" in hpo("ui", **away)[1]
        for command in (["status", "--json"], ["best"], ["show", "0"], ["compare", "--all"], ["verify"]):
            hpo(*command, **away)
        assert hpo("best", "--to", str(tmp_path / "best.yaml"), **away)[0] == 0
        assert hpo("compare", "--to", str(tmp_path / "table.csv"), **away)[0] == 0
        assert hpo("export", "0", "--to", str(tmp_path / "exported.safetensors"), **away)[0] == 0
    assert watch.looks > 10 and not watch.found
    assert len(list((tmp_path / "home").rglob("*.log"))) >= 4
    assert CANARY not in rows_of(storage)
    assert found_in(tmp_path) == []
    made = [home := tmp_path / "home", *home.rglob("*")]
    assert len(made) > 20 and [path for path in made if path.stat().st_mode & 0o077] == []


USABLE = [  # as far as can be told without a connection
    f"postgresql+psycopg://me:{CANARY}@{AWAY}/x",
    f"postgresql+psycopg://me@{AWAY}/x?password={CANARY}",
    f"postgresql+psycopg://me@{AWAY}/x?pasword={CANARY}",
]
UNUSABLE = [
    f"postgresql+psycopg://me:a@{CANARY}@{AWAY}/x",
    f"postgresql+psycopg://me:a/{CANARY}@{AWAY}/x",
    f"postgresql+psycopg://me:{CANARY} b@{AWAY}/x",
    f"postgresql+psycopg://me:{CANARY}/x",
    f"postgresql+psycopg://me/x:{CANARY}@{AWAY}/x",
    f"postgresql//me:{CANARY}@{AWAY}/x",
    f"me:{CANARY}@{AWAY}/x",
    f"http://me:a@{CANARY}@{AWAY}",
    f"http://me:a/{CANARY}@{AWAY}",
    f"http://me:{CANARY}",
    f"http://me:{CANARY}\u2100@{AWAY}",
    f"http://{AWAY}/?token={CANARY}",
    f"http://{AWAY}/#token={CANARY}",
    f"http://[{CANARY}@{AWAY}",
    f"ftp://me:{CANARY}@{AWAY}",
]


@rounds(
    ("flag", "url"), [*(("--storage", url) for url in USABLE + UNUSABLE), *(("--tracking-uri", u) for u in UNUSABLE)]
)
def test_a_url_that_cannot_be_used_is_told_without_its_password(tmp_path, flag, url):
    command = ["run", *STUDY, "--executor", "inline", "--trials", "1", flag, url, "--home", str(tmp_path / "home")]
    ran = CliRunner().invoke(app, command)
    assert isinstance(ran.exception, SystemExit) and ran.exit_code in (1, 2, 75), (ran.output, ran.exception)
    assert CANARY not in ran.output and "***" in ran.output
    assert not (tmp_path / "home").exists()


def test_a_url_where_none_belongs_is_quoted_without_its_password():
    ran = CliRunner().invoke(app, ["status", USABLE[0]])
    assert ran.exit_code == 2 and "me:***@" in ran.output and CANARY not in ran.output


@pytest.mark.usefixtures("process")
def test_pages_start_without_a_password_in_arguments_and_log(tmp_path, monkeypatch):
    """MLflow's server is given a URI that its own error repeats."""
    home = Home.at(tmp_path).create()
    server = ui.start(home, f"postgresql+nodriver://me:{CANARY}@{AWAY}/x", 5999)
    with Watch() as watch:
        assert server.wait(60) != 0
    assert watch.looks > 10 and not watch.found
    assert "nodriver" in (home.logs / "ui.log").read_text()
    assert found_in(tmp_path) == []


@pytest.mark.usefixtures("process")
def test_what_a_supervised_program_prints_passes_the_redaction(tmp_path, monkeypatch):
    (tmp_path / "printing.py").write_text(f"print('of http://me:{CANARY}@h/x'); raise SystemExit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    program = spawn("hpo.tracking.ui.supervise", ["printing"], tmp_path / "log")
    assert program.wait(30) == 7
    assert (tmp_path / "log").read_text() == "of http://me:***@h/x\n"
