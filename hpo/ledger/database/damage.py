"""Finds the value that makes a ledger in SQLite unreadable: SQLite checks neither JSON nor the type of a value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Column, Float, Integer, LargeBinary, Table, cast, func, select
from sqlalchemy.engine import Connection

from hpo.ledger.database.tables import Json, metadata

_OBJECTIVE = ("metric", "direction", "select")


def first(connection: Connection) -> str:
    """Returns a description of the first value that does not fit its column; "" if none, or for other databases."""
    if connection.dialect.name != "sqlite":
        return ""
    for table in metadata.sorted_tables:
        keys = [*table.primary_key]
        for column in table.columns:
            query = select(func.typeof(column), cast(column, LargeBinary), *keys)
            values: Any = connection.execute(query)
            for row in values:
                if fault := _fault(table, column, row[0], row[1]):
                    where = ", ".join(f"{key.name} {row[at]!r}" for at, key in enumerate(keys, start=2))
                    return f"{column.name} in table {table.name}, row {where}, {fault}"
    return ""


def _fault(table: Table, column: Column[Any], kind: str, raw: bytes | None) -> str:
    """Returns what is wrong with a value of SQLite's type `kind`."""
    if raw is None:
        return "" if column.nullable else "is missing"
    if isinstance(column.type, Integer | Float):
        return "" if kind in ("integer", "real") else "is not a number"
    try:
        text = raw.decode()
        if not isinstance(column.type, Json):
            return "" if kind == "text" else "is not text"
        value: Any = json.loads(text)
    except UnicodeDecodeError:
        return "is not UTF-8"
    except (ValueError, RecursionError):
        return "is not JSON"
    if value is None:
        return "" if column.nullable else "is missing"
    if not _is(value, column.type.kind):
        return "is another kind of JSON"
    return spec_fault(value) if (table.name, column.name) == ("studies", "spec") else ""


def spec_fault(spec: Mapping[str, object]) -> str:
    """Returns what a study's specification lacks that every reader needs; "" if nothing."""
    if not spec:  # a flipped bit cannot cause this
        return ""
    objectives: Any = spec.get("objectives")
    if not _is(objectives, list) or not objectives:
        return "has no objectives"
    if not all(
        _is(objective, dict) and all(_is(objective.get(key), str) for key in _OBJECTIVE) for objective in objectives
    ):
        return "has an objective that is none"
    strategy: Any = spec.get("strategy", {"name": "none"})
    texts = {name: spec.get(name, "") for name in ("name", "reference", "sampler")}
    texts["strategy"] = strategy.get("name") if _is(strategy, dict) else None
    return next((f"has no {name}" for name, text in texts.items() if not _is(text, str)), "")


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind)
