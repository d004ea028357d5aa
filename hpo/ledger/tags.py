"""Stores tags of trials and of studies. A removed tag stays as a row without a value, so that trackers drop it.

`put` is a body for `Ledger.transact`: repeating it changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from sqlalchemy import select, update
from sqlalchemy.dialects import postgresql, sqlite

from hpo.ledger.claims import Claim
from hpo.ledger.database.tables import studies, tags, trials
from hpo.ledger.rows import Connection
from hpo.ledger.views.mirror import STUDY

Tags = dict[str, str | None]  # None: removed


def put(connection: Connection, study_id: int, number: int, given: Mapping[str, str | None]) -> bool:
    """Sets tags of trial `number` or of the STUDY, or removes those given as None; returns whether anything has
    changed.

    The revision grows so that trackers see the change.
    """
    changed = _write(connection, study_id, number, given)
    if changed and number == STUDY:
        bump = update(studies).where(studies.c.id == study_id).values(revision=studies.c.revision + 1)
        connection.execute(bump)
    elif changed:
        of_trial = (trials.c.study_id == study_id) & (trials.c.number == number)
        connection.execute(update(trials).where(of_trial).values(revision=trials.c.revision + 1))
    return changed


def put_held(connection: Connection, taken: Claim, given: Mapping[str, str | None]) -> None:
    """Sets tags of an attempt's trial; the caller handles the trial's revision and fence."""
    _write(connection, taken.study_id, taken.number, given)


def _write(connection: Connection, study_id: int, number: int, given: Mapping[str, str | None]) -> bool:
    before = every(connection, study_id, [number]).get(number, {})
    new = {key: value for key, value in given.items() if before.get(key) != value}
    if new:
        insert = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(tags)
        changes = {"value": insert.excluded.value, "at": insert.excluded.at}
        row = {"study_id": study_id, "number": number, "at": time.time()}
        statement = insert.on_conflict_do_update(index_elements=list(tags.primary_key), set_=changes)
        connection.execute(statement, [row | {"key": key, "value": value} for key, value in new.items()])
    return bool(new)


def every(connection: Connection, study_id: int, numbers: Sequence[int]) -> dict[int, Tags]:
    """Returns trial number, or STUDY -> its tags by name, including removed ones."""
    tags_of: dict[int, Tags] = {}
    rows = connection.execute(
        select(tags.c.number, tags.c.key, tags.c.value)
        .where(tags.c.study_id == study_id, tags.c.number.in_(list(numbers)))
        .order_by(tags.c.number, tags.c.key)
    )
    for row in rows:
        tags_of.setdefault(row.number, {})[row.key] = row.value
    return tags_of


def given(connection: Connection, study_id: int) -> dict[int, dict[str, str]]:
    """Returns trial number, or STUDY -> its present tags by name."""
    tags_of: dict[int, dict[str, str]] = {}
    is_present = (tags.c.study_id == study_id) & tags.c.value.is_not(None)
    query = select(tags.c.number, tags.c.key, tags.c.value).where(is_present).order_by(tags.c.number, tags.c.key)
    for row in connection.execute(query):
        tags_of.setdefault(row.number, {})[row.key] = row.value
    return tags_of


def split(found: Mapping[str, str | None]) -> tuple[dict[str, str], list[str]]:
    """Returns the present tags, and the names of the removed ones."""
    return {k: v for k, v in found.items() if v is not None}, [k for k, v in found.items() if v is None]
