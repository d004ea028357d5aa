"""Reads the results of queries into rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

from sqlalchemy.engine import Result

Kind = TypeVar("Kind")
Own = TypeVar("Own", bound="OfTrial")


class OfTrial(Protocol):
    """A row that names its trial."""

    @property
    def trial_id(self) -> int | None: ...


def every(kind: type[Kind], result: Result[*tuple[Any, ...]]) -> list[Kind]:
    """Returns the rows of a result as `kind`. Raises TypeError unless its columns are the fields, in order."""
    _check(kind, result)
    return [kind(*row) for row in result]


def first(kind: type[Kind], result: Result[*tuple[Any, ...]]) -> Kind | None:
    """Returns the first row of a result as `every` does, None if there is none."""
    _check(kind, result)
    row = result.first()
    return None if row is None else kind(*row)


def _check(kind: type[Any], result: Result[*tuple[Any, ...]]) -> None:
    if (columns := tuple(result.keys())) != kind.__match_args__:
        raise TypeError(f"{kind.__name__} has the fields {kind.__match_args__}, and its query the columns {columns}")


def by_trial(rows: Iterable[Own]) -> dict[int, list[Own]]:
    """Returns trial id -> its rows, in their order."""
    groups: dict[int, list[Own]] = {}
    for row in rows:
        if row.trial_id is not None:
            groups.setdefault(row.trial_id, []).append(row)
    return groups
