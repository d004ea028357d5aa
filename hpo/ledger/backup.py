"""Copies a ledger of SQLite while other processes write it, and holds the checkpoints that a copy needs."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

from sqlalchemy import func, select, update

from hpo.errors import StorageError, UserError
from hpo.ledger.database.faults import one_sentence
from hpo.ledger.database.store import Ledger
from hpo.ledger.database.tables import checkpoints, trials
from hpo.ledger.database.tables import studies as study_rows
from hpo.ledger.rows import Connection


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


def hold(connection: Connection, studies: Sequence[str], until: float) -> int:
    """Keeps retention from the kept checkpoints of the studies named, until that time or a later one that is set.

    Returns how many they are.
    """
    of_studies = select(trials.c.id).join(study_rows).where(study_rows.c.name.in_(studies))
    kept = (checkpoints.c.state == "kept") & checkpoints.c.trial_id.in_(of_studies)
    longer = func.coalesce(checkpoints.c.held_until, 0.0) < until
    connection.execute(update(checkpoints).where(kept, longer).values(held_until=until))
    return connection.execute(select(func.count()).select_from(checkpoints).where(kept)).scalar_one()


def settle(target: Path) -> None:
    """Makes a copy that has been read a single file again, without a journal beside it."""
    with closing(sqlite3.connect(target)) as copied:
        copied.execute("PRAGMA journal_mode=DELETE")
