"""Imports trials that ended elsewhere as rows of a study that nobody drives, in one transaction.

The other tool's data that fit no column (its attributes, its own distributions) are stored as one text beside the ask,
since JSON of a database holds neither NaN nor NUL.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import func, select, update

from hpo.errors import UserError
from hpo.ledger.database import statements as sql
from hpo.ledger.database.json import plain, text
from hpo.ledger.database.tables import asks, reports, studies, trials
from hpo.ledger.external import KEY
from hpo.ledger.read import every
from hpo.ledger.removal import check_whole
from hpo.ledger.rows import Connection, ImportedTrial
from hpo.ledger.views import driver as driver_queries

RECORD = "imported"  # of asks.trial_attrs
_PAGE = 1000  # rows per statement


@dataclass(frozen=True)
class Row:
    """A trial for the ledger to store.

    key      the other tool's name of it, unique in a study
    columns  of `trials`, except number, revision and told
    values   (step, epoch, metric, value, seconds since the epoch), in the order of steps
    stopped  why it was stopped, if it was
    record   what no column holds
    """

    key: str
    columns: Mapping[str, Any]
    params: Mapping[str, Any]
    config_hash: str
    values: Sequence[tuple[int, int, str, float, float]] = ()
    stopped: str = ""
    record: Mapping[str, Any] = field(default_factory=dict[str, Any])


def add(
    connection: Connection, study: Mapping[str, object], rows: Sequence[Row], stored: Mapping[str, object] | None
) -> int:
    """Adds the trials that the study lacks, and the study itself if there is none; returns how many were added.

    `study` is its row, with the specification that holds once they are in it; `stored` is the specification it was made
    from, None if there was no study. Raises UserError if another import has changed that in the meantime. Idempotent by
    the keys.
    """
    row = driver_queries.create_study(connection, study)
    check_whole(row)
    expected = row.uid == study["uid"] if stored is None else row.spec.json in (stored, study["spec"])
    if not expected:
        raise UserError(f"study {study['name']!r} has been changed while it was read: import it again.")
    connection.execute(select(studies.c.id).where(studies.c.id == row.id).with_for_update())
    known = set(records(connection, row.id))
    new = [trial for trial in rows if trial.key not in known]
    first = connection.execute(select(func.count()).where(trials.c.study_id == row.id)).scalar_one()
    for number, trial in enumerate(new, first):
        _insert(connection, row.id, number, trial)
    values = {"spec": study["spec"], "requested": first + len(new)}
    if new or row.spec.json != study["spec"]:
        raised = studies.c.revision + 1
        connection.execute(update(studies).where(studies.c.id == row.id).values(**values, revision=raised))
    return len(new)


def _insert(connection: Connection, study_id: int, number: int, one: Row) -> None:
    columns = {"study_id": study_id, "number": number, "told": number, "revision": 1, "created_at": time.time()}
    trial_id = connection.execute(sql.insert_trial(connection), columns | dict(one.columns)).scalar_one()
    params = plain(dict(one.params))
    ask: dict[str, Any] = {"trial_id": trial_id, "draw": 0, "seed": 0, "told": 0, "params": params, "coordinates": {}}
    ask |= {"config": params, "config_hash": one.config_hash, "study_attrs": {}}
    ask |= {"trial_attrs": {KEY: text(one.key), RECORD: json.dumps(one.record)}}
    connection.execute(sql.INSERT_ASK, ask)
    shared = {"trial_id": trial_id, "fold": 0, "fence": 0, "revision": 1}
    points = [
        shared | {"step": step, "epoch": epoch, "key": text(key), "value": None if value != value else value, "at": at}
        for step, epoch, key, value, at in one.values
    ]
    for start in range(0, len(points), _PAGE):
        connection.execute(sql.insert_new(connection, reports), points[start : start + _PAGE])
    if one.stopped:
        decision: dict[str, Any] = {
            "trial_id": trial_id,
            "step": one.columns["step"],
            "fold": 0,
            "verdict": "stop",
            "params": {},
        }
        decision |= {"reason": text(one.stopped), "checkpoint": None, "strategy": RECORD, "fence": 0, "obeyed": 0}
        connection.execute(sql.INSERT_DECISION, decision | {"revision": 1})


def records(connection: Connection, study_id: int) -> dict[str, tuple[ImportedTrial, dict[str, Any]]]:
    """Returns key -> the `id`, `number` and `params` of each trial of an imported study, and its record, by number."""
    query = select(trials.c.id, trials.c.number, asks.c.params, asks.c.trial_attrs).join(asks)
    rows = every(
        ImportedTrial, connection.execute(query.where(trials.c.study_id == study_id).order_by(trials.c.number))
    )
    return {row.trial_attrs[KEY]: (row, record_of(row.trial_attrs)) for row in rows}


def records_by_id(connection: Connection, study_id: int) -> dict[int, dict[str, Any]]:
    """Returns trial id -> its record."""
    return {row.id: record for row, record in records(connection, study_id).values()}


def record_of(trial_attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record of an imported trial, which its columns do not hold; empty for any other trial."""
    return json.loads(trial_attrs.get(RECORD, "{}"))
