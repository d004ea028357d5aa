"""Tells a database that another program keeps: with its tables those of MLflow or Optuna must not be mixed."""

from __future__ import annotations

import sqlalchemy as sa

from hpo.ledger.sqlite_url import path_of


def is_of_another(url: str, own: str) -> bool:
    """Whether a program that is not the one of the table `own` keeps its schema there, by Alembic as they all do: each
    would take the other's version for its own. Makes nothing; raises what SQLAlchemy does."""
    if url.startswith("sqlite") and ((file := path_of(url)) is None or not file.exists()):
        return False
    engine = sa.create_engine(url)
    try:
        tables = sa.inspect(engine).get_table_names()
    finally:
        engine.dispose()
    return "alembic_version" in tables and own not in tables
