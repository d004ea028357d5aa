"""Copies a ledger of SQLite while other processes write it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import cast

from hpo.errors import StorageError, UserError
from hpo.ledger.database.faults import one_sentence
from hpo.ledger.database.store import Ledger


def check_copied_here(ledger: Ledger) -> None:
    """Raises UserError for a ledger that only its own server's tools can copy."""
    if not ledger.is_sqlite:
        raise UserError(
            f"{ledger.shown} is backed up by PostgreSQL itself: `pg_dump --format=custom` writes one snapshot of it "
            "while workers write, and `hpo repair` makes the files agree with it after `pg_restore`."
        )


def copy(ledger: Ledger, target: Path) -> None:
    """Writes one snapshot of the ledger to `target`, a file that does not exist yet; writers go on meanwhile.

    Raises StorageError.
    """
    with one_sentence(ledger), ledger.engine.connect() as connection:
        source = cast(sqlite3.Connection, connection.connection.driver_connection)
        try:
            with closing(sqlite3.connect(target)) as copied:
                source.backup(copied)  # all pages in one step, which is one snapshot
        except sqlite3.Error as error:
            raise StorageError(f"the ledger {ledger.shown} cannot be copied to {target}: {error}.") from error


def settle(target: Path) -> None:
    """Makes a copy that has been read a single file again, without a journal beside it."""
    with closing(sqlite3.connect(target)) as copied:
        copied.execute("PRAGMA journal_mode=DELETE")
