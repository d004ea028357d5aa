"""Versions the ledger's schema, and decides which releases may use a ledger together.

A release expands the schema: it adds tables, and columns that may stay empty, so the release before it continues to
work with the same ledger. A later release drops what nobody reads any more. Each ledger stores the oldest schema whose
releases may use it, and each driver, mirror and worker records the schema of its release. An upgrade that would lock
out a running process is refused and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import func, select
from sqlalchemy.engine import Connection

from hpo.errors import LedgerInUse
from hpo.ledger.database.tables import attempts, compatibility, leases, metadata, studies, trials, workers
from hpo.ledger.process_id import is_dead

SCHEMA_VERSION = "0009"  # the newest of migrations/versions
OLDEST_SCHEMA = "0009"  # its releases, and all later ones, may use a ledger of SCHEMA_VERSION
OLDEST_RELEASE = "0.2.0"  # the first release that has OLDEST_SCHEMA
_FIRST = "0009"  # the first schema that processes leave
_LOCK = 7463201


@dataclass(frozen=True)
class Format:
    """The schema of a ledger, None without tables, and the oldest schema and release that may use it."""

    version: str | None
    oldest_schema: str = ""
    oldest_release: str = ""

    @property
    def is_of_hpo(self) -> bool:
        return self.version is not None and self.version.isdecimal()

    @property
    def is_newer(self) -> bool:
        """Returns whether a later release made this schema, and locks out this one."""
        return (self.version or "") > SCHEMA_VERSION and not "" < self.oldest_schema <= SCHEMA_VERSION


def read(connection: Connection) -> Format:
    inspector = sa.inspect(connection)
    if not inspector.has_table("alembic_version"):
        return Format(None)
    version = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    if version == SCHEMA_VERSION or not inspector.has_table(compatibility.name):
        return Format(version)
    row = connection.execute(select(compatibility.c.schema, compatibility.c.release)).one()
    return Format(version, *row)


def upgrade(connection: Connection, *, evict: bool = False) -> None:
    """Makes the tables, or brings them to SCHEMA_VERSION; several processes may do so at once.

    Raises LedgerInUse where a process of a release that could not go on holds a lease or trains, unless `evict`.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
    now = read(connection)
    if (now.version or "") >= SCHEMA_VERSION:
        return
    if now.version is None:
        # The same tables the migrations give (a test compares them), without the cost of importing Alembic.
        metadata.create_all(connection)
        connection.exec_driver_sql("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
        connection.exec_driver_sql(f"INSERT INTO alembic_version VALUES ('{SCHEMA_VERSION}')")
    else:
        from hpo.ledger.migrations import upgrade as migrated

        if not evict and (users := _locked_out(connection, now.version)):
            raise LedgerInUse(f"this release locks out {'; '.join(users)}: end them first.")
        migrated(connection)
    connection.execute(compatibility.delete())
    connection.execute(compatibility.insert().values(schema=OLDEST_SCHEMA, release=OLDEST_RELEASE))


def _locked_out(connection: Connection, version: str) -> list[str]:
    """Returns the processes, of releases before OLDEST_SCHEMA, that are not known to be dead."""
    if version < _FIRST:
        return []
    study = func.substr(leases.c.name, func.length("driver:") + 1) == sa.cast(studies.c.id, sa.String)
    drivers = select(studies.c.name, leases.c.host, leases.c.pid, leases.c.pid_started).where(
        leases.c.name.startswith("driver:"), study, leases.c.owner.is_not(None), leases.c.schema < OLDEST_SCHEMA
    )
    training = (
        select(studies.c.name, workers.c.host, workers.c.pid, workers.c.pid_started)
        .join(attempts, attempts.c.worker_id == workers.c.id)
        .join(trials, trials.c.id == attempts.c.trial_id)
        .join(studies, studies.c.id == trials.c.study_id)
        .where(attempts.c.outcome.is_(None), workers.c.schema < OLDEST_SCHEMA)
        .distinct()
    )
    return [
        f"the {role} of study {name} on {host} (pid {pid})"
        for role, query in (("driver", drivers), ("worker", training))
        for name, host, pid, started in connection.execute(query)
        if not is_dead(host, pid, started)
    ]
