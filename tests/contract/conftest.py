"""A ledger on each database that is supported."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from hpo.ledger import Ledger

_schemas = itertools.count()


@pytest.fixture(params=["sqlite", "postgresql"])
def storage(request, tmp_path) -> str:
    """The URL of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}"
    return request.getfixturevalue("postgres_database")()


@pytest.fixture
def ledger(storage) -> Iterator[Ledger]:
    opened = Ledger(storage)
    yield opened
    opened.close()
