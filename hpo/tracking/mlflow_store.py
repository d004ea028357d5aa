"""MLflow's own SQLite database in a home: making it, and keeping its paths true when the home is moved."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from urllib.parse import unquote

from hpo.ledger.sqlite_url import url_of
from hpo.terminal import print
from trainer.files.durable import sync

REVISION = "dc11669786a5"  # of the tables of the versions that are recorded

# Where MLflow 3.17 keeps absolute paths of artifacts.
_PATHS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


def initialise(database: Path, artifacts: Path) -> None:
    """Make MLflow's SQLite database, in WAL mode, unless it is there; one process at a time.

    It is made under another name: a process killed half-way through MLflow's dozens of migrations would leave a
    database that no later one can open. One that has been moved together with `artifacts`, beside it, is told so.
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
    """Make the tables and MLflow's first experiment, by `statements` where there are any, and without MLflow then."""
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
    """A directory as MLflow keeps it: MLflow unquotes what it reads, of plain paths too."""
    return str(directory).replace("%", "%25")


def recorded() -> str:
    """The statements that make what the migrations of the installed MLflow make, much sooner; "" if not known.

    `python -m hpo.tracking.mlflow_store` writes the file for a version; a test holds it against the migrations.
    """
    path = Path(__file__).with_name(f"mlflow-{version('mlflow-skinny')}.sql")
    return path.read_text(encoding="utf-8") if path.exists() else ""


def record(directory: Path) -> str:
    """The statements that make a database as MLflow's migrations leave it, made in `directory`; no path is in them."""
    _fill(directory / "mlflow.db", directory, "")
    with closing(sqlite3.connect(directory / "mlflow.db")) as connection:
        connection.execute("DELETE FROM experiments")
        connection.commit()
        return "\n".join(connection.iterdump()) + "\n"


def leftovers(database: Path) -> list[Path]:
    """What an `initialise` that was killed has left; nothing while one is at work."""
    found = sorted(database.parent.glob(f"{database.name}.new*"))
    lock = Path(f"{database}.lock")
    if found and lock.exists():
        with lock.open() as held:
            try:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return []
    return found


def _follow(database: Path, artifacts: Path) -> None:
    """Let the paths in a database that lies beside `artifacts` begin there, if those that were made with it do not."""
    if database.parent != artifacts.parent:
        return
    with closing(sqlite3.connect(database, timeout=60)) as connection, connection:
        made = connection.execute("SELECT artifact_location FROM experiments WHERE experiment_id = 0").fetchone()
        here = location(artifacts)
        root = made[0].removesuffix("/0") if made else here
        if root == here or not root.startswith("/"):
            return
        print(f"this home lay in {unquote(str(Path(root).parent))} before: MLflow's paths follow it.", flush=True)
        for table, column in _PATHS:
            connection.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",
                (here, len(root) + 1, len(root) + 1, f"{root}/"),
            )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        Path(__file__).with_name(f"mlflow-{version('mlflow-skinny')}.sql").write_text(
            record(Path(scratch)), encoding="utf-8"
        )
