"""Recognizes the databases of other programs: URLs that name one, and tables that MLflow's or Optuna's must not
join."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import make_url

from hpo.ledger.database.sqlite_url import path_of


def is_of_another(url: str, own: str) -> bool:
    """Returns whether the database holds the Alembic schema of a program that does not own the table `own`.

    Each would mistake the other's version for its own. Creates nothing; raises SQLAlchemy's errors.
    """
    if url.startswith("sqlite") and ((file := path_of(url)) is None or not file.exists()):
        return False
    engine = sa.create_engine(url)
    try:
        tables = sa.inspect(engine).get_table_names()
    finally:
        engine.dispose()
    return "alembic_version" in tables and own not in tables


def names_database(url: str) -> bool:
    """Returns True if SQLAlchemy knows the URL's scheme and the database outlives its connection."""
    try:
        dialect = make_url(url).get_dialect()
    except (exc.ArgumentError, ValueError):  # ValueError for a port that cannot be read as a number
        return False
    return dialect.name != "sqlite" or path_of(url) is not None
