"""Says of a SQLite database that shows the ledger that it is damaged, and what to do: one sentence in every command."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from urllib.parse import unquote

from hpo.ledger.sqlite_url import path_of
from hpo.ledger.store import read_only, writable
from hpo.text import command

MLFLOW = ("MLflow's database", "sync")  # what it is, and the command that makes it anew
OPTUNA = ("Optuna's storage", "ui --optuna")
_DAMAGED = ("database disk image is malformed", "file is not a database")  # as SQLite says it


def damage_of(uri: str, what: tuple[str, str] = MLFLOW) -> str:
    """The sentence if the database at `uri` is damaged; "" if it is sound, missing, locked, or no file of this host.

    Every page of it is read (SQLite's documentation, "PRAGMA quick_check").
    """
    database = path_of(uri) if uri.startswith("sqlite") else None
    if database is None or not database.is_file():
        return ""
    file = f"{database.absolute().as_uri()}?mode=rw"
    if not writable(database):
        file = unquote(read_only(uri, database).partition(":///")[2])  # which SQLAlchemy has quoted
    try:
        with closing(sqlite3.connect(file, uri=True, timeout=60)) as connection:
            [(found,)] = connection.execute("PRAGMA quick_check(1)").fetchall()
    except sqlite3.Error as error:
        return of_error(uri, str(error), what)
    return "" if found == "ok" else _sentence(uri, found, what)


def of_error(uri: str, text: str, what: tuple[str, str] = MLFLOW) -> str:
    """The sentence if what SQLite, or a library over it, says is that the database at `uri` is damaged; else ""."""
    return next((_sentence(uri, words, what) for words in _DAMAGED if words in text), "")


def _sentence(uri: str, found: str, what: tuple[str, str]) -> str:
    name, anew = what
    return (
        f"{name} {path_of(uri)} is damaged ({' '.join(found.split())[:100]}): move it away, with its -wal and -shm, "
        f"and `{command(anew)}` makes it anew from the ledger."
    )
