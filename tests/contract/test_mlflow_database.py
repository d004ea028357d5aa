"""MLflow's own database as it is made for a home."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from hpo.tracking.mlflow_store import initialise

TIMES = ("creation_time", "last_update_time")


def contents(path) -> tuple[list[str], list[dict]]:
    """Everything in a database but when its first experiment was made.

    The lines of a statement are sorted: Alembic rebuilds a table with its constraints in the order of a set.
    """
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT * FROM experiments")
        names = [column[0] for column in rows.description]
        first = [{name: value for name, value in zip(names, row, strict=True) if name not in TIMES} for row in rows]
        connection.execute("DELETE FROM experiments")
        return sorted(_sorted_lines(statement) for statement in connection.iterdump()), first


def _sorted_lines(statement: str) -> str:
    return "\n".join(sorted(line.strip().rstrip(",") for line in statement.splitlines()))


def test_recorded_statements_make_what_migrations_make(tmp_path, monkeypatch):
    """`python -m hpo.tracking.mlflow_store` records those of another version of MLflow."""
    made, migrated = tmp_path / "made.db", tmp_path / "migrated.db"
    initialise(made, tmp_path / "artifacts")
    monkeypatch.setattr("mlflow.version.VERSION", "0.0.0")  # nothing is recorded of it
    initialise(migrated, tmp_path / "artifacts")
    assert contents(made) == contents(migrated)
    assert contents(made)[1][0]["artifact_location"] == str(tmp_path / "artifacts" / "0")
