"""Collects what `hpo verify` finds."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.engine import Connection, RowMapping


@dataclass
class Report:
    """`counts` of what was looked at; `differences`, one sentence each; `behind` as `mirror_process.behind` counts."""

    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    behind: int = 0


def by_trial(connection: Connection, query: Any) -> dict[int, list[RowMapping]]:
    """Trial id -> its rows."""
    groups: dict[int, list[RowMapping]] = defaultdict(list)
    for row in connection.execute(query).mappings():
        groups[row["trial_id"]].append(row)
    return groups
