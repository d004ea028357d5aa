"""Records the processes that train: when each began, where, and with which release's schema."""

from __future__ import annotations

import time

from sqlalchemy import update
from sqlalchemy.engine import Connection

from hpo.ledger.database.schema import SCHEMA_VERSION
from hpo.ledger.database.statements import insert_new
from hpo.ledger.database.tables import workers
from hpo.ledger.process_id import Process


def register(connection: Connection, process: Process, executor: str) -> None:
    """Inserts a worker's row."""
    row = {"id": process.id, "host": process.host, "pid": process.pid, "pid_started": process.started}
    row |= {"slots": 1, "executor": executor, "started_at": time.time(), "schema": SCHEMA_VERSION}
    connection.execute(insert_new(connection, workers), row)


def unregister(connection: Connection, process: Process) -> None:
    """Records that a worker has ended in good order."""
    connection.execute(update(workers).where(workers.c.id == process.id).values(ended_at=time.time()))
