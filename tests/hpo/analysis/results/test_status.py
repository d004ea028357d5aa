"""`hpo status` of a study that nobody drives says why it has ended, what MLflow lacks, and what to do next."""

from __future__ import annotations

from contextlib import closing

import pytest
from crafted import open_crafted, put_trial
from sqlalchemy import update
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.ledger import Ledger, queries
from hpo.ledger.database import tables
from hpo.ledger.views import mirror as mirror_queries
from hpo.storage.home import Home
from hpo.tracking.uri import tracker_name


def status(home: Home) -> list[str]:
    return CliRunner().invoke(app, ["status", "--study", "crafted", "--home", str(home.root)]).stdout.splitlines()


def change(ledger: Ledger, **columns) -> None:
    with ledger.write() as connection:
        connection.execute(update(tables.studies).values(**columns))


@pytest.fixture
def crafted(home):
    home.create()
    with closing(open_crafted(home.root / "ledger.db")) as ledger:
        put_trial(ledger, 0, "complete", (0.1, 0.5))
        for number in (1, 2, 3):
            put_trial(ledger, number, "failed", outcome="user_error", error="own.py:3, in f: no", traceback="T: no")
        yield ledger


def test_an_interrupted_study_says_how_it_goes_on(crafted, home):
    assert status(home)[-3:] == [
        f"MLflow is behind by 1 transaction: `hpo sync --home {home.root}` sends what is missing; nothing is lost.",
        f"hpo show 1 --study crafted --home {home.root}  why it failed",
        f"hpo resume --study crafted --home {home.root}  goes on; trials that were cut off start again",
    ]


def test_a_study_whose_time_is_used_up_says_so(crafted, home):
    change(crafted, max_seconds=60.0, seconds_used=61.0)
    [line] = [line for line in status(home) if "resume" in line]
    again = f"`hpo resume --study crafted --time 2m1s --home {home.root}`"
    assert line == f"the time of 1m is used up: {again} goes on from the last checkpoints."


def test_a_stopped_study_says_its_reason_and_shows_the_failure(crafted, home):
    change(crafted, state="stopped")
    lines = status(home)
    assert "3 trials in a row failed in the same way:" in lines and "T: no" in lines
    assert any(line.startswith("correct the study, then `hpo resume --study crafted --allow-drift") for line in lines)
    assert lines[-1].startswith("hpo show 1 --study crafted") and lines[-1].endswith("why it failed")


def test_a_complete_study_that_mlflow_has_says_nothing_more(crafted, home):
    change(crafted, state="complete")
    assert status(home)[-1].startswith("MLflow is behind by 1 transaction")
    row = crafted.look(lambda c: queries.study_row(c, "crafted"))
    name = tracker_name(home.tracking_uri)
    with crafted.write() as connection:
        assert mirror_queries.study_cursor(connection, name, row.id) is None
        mirror_queries.move(connection, name, row.id, [(mirror_queries.STUDY, "run", row.revision)])
    assert status(home)[-1].startswith("  best: trial 0")
