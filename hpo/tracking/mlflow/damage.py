"""Reports that MLflow's SQLite database is damaged, and what to do, with the same sentence in every command."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from urllib.parse import unquote

from hpo.ledger.database.sqlite_url import path_of
from hpo.ledger.database.store import read_only, writable
from hpo.text import command

_DAMAGED = ("database disk image is malformed", "file is not a database")  # SQLite's own messages


def damage_of(uri: str) -> str:
    """Returns the sentence about a damaged database at `uri`; "" if it is sound, missing, locked, or not a local file.

    Every page of it is read (SQLite's documentation, "PRAGMA quick_check").
    """
    database = path_of(uri) if uri.startswith("sqlite") else None
    if database is None or not database.is_file():
        return ""
    file = f"{database.absolute().as_uri()}?mode=rw"
    if not writable(database):
        file = unquote(read_only(uri, database).partition(":///")[2])  # SQLAlchemy has quoted it
    try:
        with closing(sqlite3.connect(file, uri=True, timeout=60)) as connection:
            [(check_result,)] = connection.execute("PRAGMA quick_check(1)").fetchall()
    except sqlite3.Error as error:
        return of_error(uri, str(error))
    return "" if check_result == "ok" else _sentence(uri, check_result)


def of_error(uri: str, text: str) -> str:
    """Returns the sentence if `text` is an error of SQLite, or of a library over it, about damage at `uri`; else ""."""
    return next((_sentence(uri, words) for words in _DAMAGED if words in text), "")


def _sentence(uri: str, found: str) -> str:
    return (
        f"MLflow's database {path_of(uri)} is damaged ({' '.join(found.split())[:100]}): move it away, with its -wal "
        f"and -shm, and `{command('sync')}` makes it anew from the ledger."
    )
