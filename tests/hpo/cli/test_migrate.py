"""`hpo migrate --check --wait`: waits for another process to make or upgrade the ledger, and for nothing else."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

from mirrored import Made
from study_runs import refused
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.clock import SystemClock
from hpo.ledger import Ledger, leases, migrations
from hpo.ledger.database import schema
from hpo.ledger.process_id import Process
from hpo.storage.home import Home

LATEST = schema.SCHEMA_VERSION
RAISE = "UPDATE alembic_version SET version_num = '9999'"


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
    assert result.exit_code == 0 and f"this release can use {url}." in result.stdout, result.output


def test_it_waits_until_the_ledger_is_upgraded_and_changes_nothing_itself(tmp_path):
    file = tmp_path / "ledger.db"
    url = f"sqlite:///{file}"
    Ledger(url).close()
    mark(file, "0007")
    assert "was written by an older release (schema 0007" in refused(check(url, 1), 1)
    upgrading = threading.Timer(1.5, mark, (file, LATEST))
    upgrading.start()
    assert check(url, 120).exit_code == 0
    upgrading.join()


def test_an_upgrade_that_locks_out_a_running_driver_waits_for_it(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    made = Made(Home(tmp_path / "home"), storage=url)
    process = Process.current()
    held = leases.acquire(made.ledger, f"driver:{made.id}", made.name, process, SystemClock(), 0)
    monkeypatch.setattr(schema, "SCHEMA_VERSION", "9999")
    monkeypatch.setattr(schema, "OLDEST_SCHEMA", "9999")
    monkeypatch.setattr(migrations, "upgrade", lambda connection: connection.exec_driver_sql(RAISE))
    migrate = ["migrate", "--storage", url]
    error = refused(CliRunner().invoke(app, migrate), 1)
    said = f"this release locks out the driver of study {made.name} on {process.host} (pid {process.pid}): end them"
    assert said in error
    with made.ledger.read() as connection:
        assert schema.read(connection) == schema.Format(LATEST, LATEST, schema.OLDEST_RELEASE)  # nothing has changed
    leaving = threading.Timer(1.5, held.release)
    leaving.start()
    result = CliRunner().invoke(app, [*migrate, "--wait", "120"])
    leaving.join()
    assert result.exit_code == 0 and result.stdout.count("waiting: this release locks out") == 1, result.output
    with made.ledger.read() as connection:
        assert schema.read(connection).version == "9999"
    made.ledger.close()


def test_what_no_other_process_can_change_is_refused_at_once(tmp_path):
    begun = time.monotonic()
    error = refused(check("mysql://h/x", 3600), 2)
    assert "is not supported: use sqlite:///PATH or postgresql+psycopg://..." in error
    assert time.monotonic() - begun < 60
