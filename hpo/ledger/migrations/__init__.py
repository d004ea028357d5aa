"""Runs Alembic migrations of the ledger inside the caller's transaction."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.engine import Connection


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Migrates the database behind `connection` to `revision`, in its open transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
