"""The types of what queries take and give, for callers outside of the ledger, which import no SQLAlchemy."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy.engine import Connection, RowMapping

__all__ = ["Connection", "RowMapping", "by_trial"]


def by_trial(rows: Iterable[RowMapping]) -> dict[int, list[RowMapping]]:
    """Trial id -> its rows, in their order."""
    groups: dict[int, list[RowMapping]] = {}
    for row in rows:
        groups.setdefault(row["trial_id"], []).append(row)
    return groups
