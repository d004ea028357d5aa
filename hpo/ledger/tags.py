"""Tags of trials and of studies. A tag that was removed stays as a row without a value, by which trackers drop it.

`put` is a body for `Ledger.transact`: given again it changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from sqlalchemy import select, update
from sqlalchemy.dialects import postgresql, sqlite

from hpo.ledger.claims import Claim
from hpo.ledger.mirror_queries import STUDY
from hpo.ledger.rows import Connection
from hpo.ledger.tables import studies, tags, trials

Tags = dict[str, str | None]  # None: removed


def put(connection: Connection, study_id: int, number: int, given: Mapping[str, str | None]) -> bool:
    """Set tags, or remove those given as None, of trial `number` or of the STUDY, whose revision grows so that trackers
    see it; whether anything has changed."""
    changed = _write(connection, study_id, number, given)
    if changed and number == STUDY:
        bump = update(studies).where(studies.c.id == study_id).values(revision=studies.c.revision + 1)
        connection.execute(bump)
    elif changed:
        of_trial = (trials.c.study_id == study_id) & (trials.c.number == number)
        connection.execute(update(trials).where(of_trial).values(revision=trials.c.revision + 1))
    return changed


def put_held(connection: Connection, taken: Claim, given: Mapping[str, str | None]) -> None:
    """The same for the trial of an attempt, whose revision and fence are the caller's to see to."""
    _write(connection, taken.study_id, taken.number, given)


def _write(connection: Connection, study_id: int, number: int, given: Mapping[str, str | None]) -> bool:
    before = every(connection, study_id, [number]).get(number, {})
    new = {key: value for key, value in given.items() if before.get(key) != value}
    if new:
        insert = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(tags)
        changes = {"value": insert.excluded.value, "at": insert.excluded.at}
        own = {"study_id": study_id, "number": number, "at": time.time()}
        statement = insert.on_conflict_do_update(index_elements=list(tags.primary_key), set_=changes)
        connection.execute(statement, [own | {"key": key, "value": value} for key, value in new.items()])
    return bool(new)


def every(connection: Connection, study_id: int, numbers: Sequence[int]) -> dict[int, Tags]:
    """Trial number, or STUDY -> its tags by name, those that were removed too."""
    found: dict[int, Tags] = {}
    rows = connection.execute(
        select(tags.c.number, tags.c.key, tags.c.value)
        .where(tags.c.study_id == study_id, tags.c.number.in_(list(numbers)))
        .order_by(tags.c.number, tags.c.key)
    )
    for row in rows:
        found.setdefault(row.number, {})[row.key] = row.value
    return found


def given(connection: Connection, study_id: int) -> dict[int, dict[str, str]]:
    """Trial number, or STUDY -> the tags that it has, by name."""
    found: dict[int, dict[str, str]] = {}
    own = (tags.c.study_id == study_id) & tags.c.value.is_not(None)
    query = select(tags.c.number, tags.c.key, tags.c.value).where(own).order_by(tags.c.number, tags.c.key)
    for row in connection.execute(query):
        found.setdefault(row.number, {})[row.key] = row.value
    return found


def split(found: Mapping[str, str | None]) -> tuple[dict[str, str], list[str]]:
    """The tags that stand, and the names of those that were removed."""
    return {k: v for k, v in found.items() if v is not None}, [k for k, v in found.items() if v is None]
