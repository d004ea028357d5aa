"""`hpo migrate --check --wait`: waits for another process to make or upgrade the ledger, and for nothing else."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

from study_runs import refused
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.ledger import Ledger
from hpo.ledger.database.store import SCHEMA_VERSION


def check(url: str, seconds: int):
    return CliRunner().invoke(app, ["migrate", "--check", "--storage", url, "--wait", str(seconds)])


def mark(file: Path, version: str) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (version,))


def test_it_waits_until_the_ledger_is_made(tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    making = threading.Timer(1.5, lambda: Ledger(url).close())
    making.start()
    result = check(url, 120)
    making.join()
    assert result.exit_code == 0 and "is a ledger of this release" in result.stdout, result.output


def test_it_waits_until_the_ledger_is_upgraded_and_changes_nothing_itself(tmp_path):
    file = tmp_path / "ledger.db"
    url = f"sqlite:///{file}"
    Ledger(url).close()
    mark(file, "0007")
    assert "was written by an older release (schema 0007" in refused(check(url, 1), 1)
    upgrading = threading.Timer(1.5, mark, (file, SCHEMA_VERSION))
    upgrading.start()
    assert check(url, 120).exit_code == 0
    upgrading.join()


def test_what_no_other_process_can_change_is_refused_at_once(tmp_path):
    begun = time.monotonic()
    error = refused(check("mysql://h/x", 3600), 2)
    assert "is not supported: use sqlite:///PATH or postgresql+psycopg://..." in error
    assert time.monotonic() - begun < 60
