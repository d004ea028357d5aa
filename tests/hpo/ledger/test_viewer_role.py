"""A role that may only read: it sees studies by every command that shows them, and each change is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sqlalchemy as sa
from crafted import open_crafted, put_trial
from places import ROOT
from sqlalchemy.exc import ProgrammingError
from typer.testing import CliRunner

from hpo.cli.main import app

# The guide's statements, which its reader runs as the owner of the database.
GRANTS = re.findall(r"^    (GRANT .*|ALTER DEFAULT .*);", (ROOT / "docs/guide/deploy.md").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def viewer(postgres_database) -> sa.URL:
    """The URL of a ledger for a role that the guide's statements let read it."""
    owner = sa.make_url(postgres_database())
    role = f"viewer_{owner.database}"
    ledger = open_crafted(Path("x.db"), url=owner.render_as_string(hide_password=False))
    put_trial(ledger, 0, "complete", (0.5,))
    with ledger.engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN")
        for statement in GRANTS:
            of_this = statement.replace("viewer", role).replace("DATABASE hpo", f"DATABASE {owner.database}")
            connection.exec_driver_sql(of_this)
    ledger.close()
    return owner.set(username=role, password=None)


@pytest.mark.parametrize("words", [["status"], ["best"], ["show", "0"], ["compare"], ["log"]])
def test_a_viewer_sees_studies(words, viewer, tmp_path):
    flags = ["--storage", viewer.render_as_string(hide_password=False), "--home", str(tmp_path)]
    result = CliRunner().invoke(app, [*words, "--json", *flags])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE studies SET state = 'complete'",
        "DELETE FROM trials",
        "INSERT INTO leases (name, fence, renewals) VALUES ('driver:1', 1, 1)",
        "UPDATE audit SET action = 'run'",
        "DROP TABLE reports",
    ],
)
def test_a_viewer_changes_nothing(statement, viewer):
    engine = sa.create_engine(viewer)
    with engine.connect() as connection, pytest.raises(ProgrammingError, match=r"permission denied|must be owner"):
        connection.exec_driver_sql(statement)
    engine.dispose()


def test_a_command_that_writes_says_what_is_refused(viewer, tmp_path):
    flags = ["--storage", viewer.render_as_string(hide_password=False), "--home", str(tmp_path)]
    result = CliRunner().invoke(app, ["tag", "0", "a=b", *flags])
    assert result.exit_code == 2, result.output
    assert "permission denied for table" in result.stderr and "use a role that may write there" in result.stderr
