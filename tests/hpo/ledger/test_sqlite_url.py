"""A home lies where its name says, whatever characters are in it: ledger, MLflow's database and artifacts."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from rounds import rounds
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.errors import UserError
from hpo.ledger import Ledger
from hpo.ledger.database.sqlite_url import path_of, url_of
from hpo.storage.home import Home
from hpo.tracking.uri import check_uri

NAMES = [
    "q?x",
    "a#b",
    "a%41b",
    "%3F",
    "a?mode=ro",
    "a b",
    "a'b",
    'a"b',
    "a;b",
    "a@b:c",
    "a\nb",
    "ü",
    "a&b=c",
    "a\\b",
    "{a}",
]


def test_a_url_names_the_path_that_it_was_made_of(tmp_path):
    for name in NAMES:
        path = tmp_path / name / "ledger.db"
        path.parent.mkdir()
        assert path_of(url_of(path)) == path
        engine = sa.create_engine(url_of(path))
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE t (x)")
        engine.dispose()
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(NAMES)
    assert url_of(Path("/home/me/.hpo/ledger.db")) == "sqlite:////home/me/.hpo/ledger.db"


@pytest.mark.usefixtures("process")
@rounds("name", ["a?b#c%41"])
def test_everything_lies_in_the_home_whatever_its_name(tmp_path, name):
    home, moved = tmp_path / "one" / name, tmp_path / "two" / f"{name} moved%25?"

    def hpo(*arguments: str, home: Path) -> None:
        result = CliRunner().invoke(app, [*arguments, "--home", str(home)])
        assert result.exit_code == 0, (result.output, result.exception)

    run = ["run", "--study", "mlp", "--executor", "inline", "--sampler", "random", "-o", "train.num_epochs=1"]
    hpo(*run, "--trials", "1", home=home)
    hpo("verify", home=home)
    assert [entry.name for entry in home.parent.iterdir()] == [name]
    assert {"ledger.db", "mlflow.db", "artifacts", "checkpoints"} <= {entry.name for entry in home.iterdir()}
    moved.parent.mkdir()
    home.rename(moved)
    hpo(*run, "--trials", "2", home=moved)
    hpo("verify", home=moved)
    assert not list(home.parent.iterdir()) and [entry.name for entry in moved.parent.iterdir()] == [moved.name]


def test_homes_that_differ_after_a_question_mark_have_two_ledgers(tmp_path):
    for name in ("q?a", "q?b"):
        Ledger(Home.at(tmp_path / name).create().storage).close()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("ledger.db")) == [
        "q?a/ledger.db",
        "q?b/ledger.db",
    ]


def test_a_question_mark_that_would_end_the_path_is_refused(tmp_path):
    for refusing in (Ledger, check_uri):
        with pytest.raises(UserError, match=r"ends its path at the '\?', and 'x/l\.db' is not an option.*write %3F"):
            refusing(f"sqlite:///{tmp_path}/q?x/l.db")
    assert not list(tmp_path.iterdir())
    assert check_uri(f"sqlite:///{tmp_path}/l.db?timeout=60") == "sqlite"


def test_a_home_of_a_user_whom_nobody_knows_is_refused():
    result = CliRunner().invoke(app, ["status", "--home", "~nouser/x"])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: '~nouser/x' begins with '~nouser', whose home directory is not known here")
