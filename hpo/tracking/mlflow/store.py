"""Creates MLflow's own SQLite database in a home, and updates its paths when the home is moved."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportPrivateUsage=false
from __future__ import annotations

import fcntl
import os
import sqlite3
import tempfile
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from urllib.parse import unquote

from hpo.ledger.database.sqlite_url import url_of
from hpo.terminal import print
from trainer.files.durable import sync

REVISION = "dc11669786a5"  # of the tables of the recorded versions

# The columns where MLflow 3.17 keeps absolute paths of artifacts.
_PATHS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


def initialise(database: Path, artifacts: Path) -> None:
    """Creates MLflow's SQLite database in WAL mode unless it exists; one process at a time.

    It is created under another name: a process killed during MLflow's dozens of migrations would leave a database that
    no process can open. If the database was moved together with `artifacts` beside it, updates its paths.
    """
    database.parent.mkdir(parents=True, exist_ok=True)
    with locked(Path(f"{database}.lock")):
        if database.exists() and database.stat().st_size:
            return _follow(database, artifacts)
        new = database.with_name(f"{database.name}.new")
        for leftover in (new, Path(f"{new}-wal"), Path(f"{new}-shm")):
            leftover.unlink(missing_ok=True)
        _fill(new, artifacts, recorded())
        sync(new)
        os.replace(new, database)
        sync(database.parent)
    return None


def _fill(new: Path, artifacts: Path, statements: str) -> None:
    """Creates the tables and MLflow's first experiment; by `statements`, without MLflow, if there are any."""
    with closing(sqlite3.connect(new)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(statements)
        if statements:
            now = int(time.time() * 1000)
            first = (0, "Default", f"{location(artifacts)}/0", "active", now, now, "default")
            connection.execute("INSERT INTO experiments VALUES (?, ?, ?, ?, ?, ?, ?)", first)
            connection.commit()
            return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore(url_of(new), location(artifacts))._dispose_engine()


def location(directory: Path) -> str:
    """Returns a directory as MLflow stores it, quoted: MLflow unquotes what it reads, even plain paths."""
    return str(directory).replace("%", "%25")


def recorded() -> str:
    """Returns the statements that create the installed MLflow's tables, faster than its migrations; "" if unknown.

    `python -m hpo.tracking.mlflow.store` writes the file for a version; a test compares it with the migrations.
    """
    path = Path(__file__).with_name(f"mlflow-{version('mlflow-skinny')}.sql")
    return path.read_text(encoding="utf-8") if path.exists() else ""


def record(directory: Path) -> str:
    """Returns the statements of a database that MLflow's migrations create in `directory`; they contain no path."""
    _fill(directory / "mlflow.db", directory, "")
    with closing(sqlite3.connect(directory / "mlflow.db")) as connection:
        connection.execute("DELETE FROM experiments")
        connection.commit()
        return "\n".join(connection.iterdump()) + "\n"


def leftovers(database: Path) -> list[Path]:
    """Returns the files that a killed `initialise` has left; none while one is running."""
    partial_databases = sorted(database.parent.glob(f"{database.name}.new*"))
    lock = Path(f"{database}.lock")
    if partial_databases and lock.exists():
        with lock.open() as lock_file:
            try:
                fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return []
    return partial_databases


def _follow(database: Path, artifacts: Path) -> None:
    """Updates the paths in a database that was moved together with `artifacts` beside it."""
    if database.parent != artifacts.parent:
        return
    with closing(sqlite3.connect(database, timeout=60)) as connection, connection:
        first_row = connection.execute("SELECT artifact_location FROM experiments WHERE experiment_id = 0").fetchone()
        directory = location(artifacts)
        root = first_row[0].removesuffix("/0") if first_row else directory
        if root == directory or not root.startswith("/"):
            return
        print(f"this home lay in {unquote(str(Path(root).parent))} before: MLflow's paths follow it.", flush=True)
        for table, column in _PATHS:
            connection.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",
                (directory, len(root) + 1, len(root) + 1, f"{root}/"),
            )


@contextmanager
def locked(path: Path) -> Generator[None, None, None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        Path(__file__).with_name(f"mlflow-{version('mlflow-skinny')}.sql").write_text(
            record(Path(scratch)), encoding="utf-8"
        )
