"""Removes a study, or its trials, from the ledger. Holds bodies for `Ledger.transact`, under the study's lease.

A study that is being removed is marked first: if `hpo rm` is killed in between, the study is never again driven,
mirrored or treated as whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sqlalchemy import delete, func, select, true, update

from hpo.errors import StudyError
from hpo.ledger import answer
from hpo.ledger.database.tables import (
    alert_cursors,
    alerts,
    asks,
    attempts,
    checkpoints,
    decisions,
    events,
    leases,
    mirrors,
    reports,
    studies,
    tags,
    trials,
)
from hpo.ledger.process_id import Process
from hpo.ledger.rows import Connection, StudyRow
from hpo.ledger.transactions import note
from hpo.text import command

REMOVING = "removing"  # a state of studies
SET_ASIDE = "set_aside"  # an event: trials without a value that a change of the declaration has replaced
CLEARED = "set_aside_cleared"  # an event: their files are removed
_KEPT_EVENTS = (SET_ASIDE, CLEARED)

_OF_TRIALS = (asks, attempts, reports, decisions, checkpoints)


def check_whole(study: StudyRow) -> None:
    """Raises StudyError for a study whose removal was interrupted."""
    if study.state == REMOVING:
        removes = command(f"rm --study {study.name}")
        raise StudyError(f"study {study.name!r} is half removed: `{removes}` finishes that; then the name is free.")


def contents(connection: Connection, study_id: int) -> dict[str, int]:
    """Returns the size of a study: `trials`, kept `checkpoints` and their `bytes`."""
    of_study = trials.c.study_id == study_id
    size = func.coalesce(func.sum(checkpoints.c.size), 0)
    kept = select(func.count(), size).join(trials).where(of_study, checkpoints.c.state == "kept")
    count, total = connection.execute(kept.select_from(checkpoints)).one()
    number = connection.execute(select(func.count()).select_from(trials).where(of_study)).scalar_one()
    return {"trials": number, "checkpoints": count, "bytes": int(total)}


def mark(connection: Connection, study_id: int, home: str, me: Process) -> None:
    """Marks the study as being removed, from this home on this host."""
    row = connection.execute(select(studies.c.environment).where(studies.c.id == study_id)).scalar_one()
    values = {"state": REMOVING, "environment": row | {"removed_from": [me.host, home]}}
    connection.execute(update(studies).where(studies.c.id == study_id).values(**values))


def erase(connection: Connection, study_id: int) -> None:
    """Deletes the study with everything that belongs to it, and its leases."""
    answer.changed(connection, study_id)
    erase_trials(connection, study_id)
    connection.execute(delete(events).where(events.c.study_id == study_id))
    study_leases = leases.c.name.endswith(f":{study_id}") | leases.c.name.like(f"mirror:{study_id}:%")
    connection.execute(delete(leases).where(study_leases))
    connection.execute(delete(tags).where(tags.c.study_id == study_id))
    connection.execute(delete(studies).where(studies.c.id == study_id))


def erase_trials(connection: Connection, study_id: int) -> None:
    """Deletes the trials with everything that belongs to them, and their cursors and tags."""
    trial_ids = select(trials.c.id).where(trials.c.study_id == study_id)
    for table in _OF_TRIALS:
        connection.execute(delete(table).where(table.c.trial_id.in_(trial_ids)))
    connection.execute(delete(events).where(events.c.study_id == study_id, events.c.trial_id.is_not(None)))
    for table in (mirrors, alerts, alert_cursors):
        connection.execute(delete(table).where(table.c.study_id == study_id))
    connection.execute(delete(tags).where(tags.c.study_id == study_id, tags.c.number >= 0))
    connection.execute(delete(trials).where(trials.c.study_id == study_id))


def set_aside(connection: Connection, study: StudyRow, values: Mapping[str, object], changed: list[str]) -> int:
    """Removes the trials and restarts the study with `values`; returns the number of trials.

    `values` include a new uid, so that trackers and a bucket do not confuse new data with old. An event keeps the
    results of the trials.
    """
    if connection.execute(select(studies.c.uid).where(studies.c.id == study.id)).scalar() == values["uid"]:
        kept = select(events.c.fields).where(events.c.uid == f"{study.uid}.{SET_ASIDE}")
        return len(connection.execute(kept).scalar_one()["trials"])  # a retried commit that had succeeded
    query = select(trials.c.number, trials.c.state, trials.c.error, asks.c.params).join(asks)
    rows = connection.execute(query.where(trials.c.study_id == study.id).order_by(trials.c.number)).mappings()
    fields = {"uid": study.uid, "changed": changed, "trials": [dict(row) for row in rows]}
    erase_trials(connection, study.id)
    connection.execute(delete(events).where(events.c.study_id == study.id, events.c.kind.not_in(_KEPT_EVENTS)))
    anew = {"state": "open", "seconds_used": 0.0, "revision": studies.c.revision + 1}
    connection.execute(update(studies).where(studies.c.id == study.id).values(**anew, **values))
    note(connection, study.id, SET_ASIDE, fields, f"{study.uid}.{SET_ASIDE}")
    return len(fields["trials"])


def uncleared(connection: Connection, study_id: int) -> list[str]:
    """Returns the uids of discarded trials whose files have not been removed yet."""
    query = select(events.c.kind, events.c.fields).where(events.c.study_id == study_id, events.c.kind.in_(_KEPT_EVENTS))
    kind_and_uid = [(kind, fields["uid"]) for kind, fields in connection.execute(query.order_by(events.c.id))]
    return [uid for kind, uid in kind_and_uid if kind == SET_ASIDE and (CLEARED, uid) not in kind_and_uid]


def cleared(connection: Connection, study_id: int, uid: str) -> None:
    """Records that the files of discarded trials are removed."""
    note(connection, study_id, CLEARED, {"uid": uid}, f"{uid}.{CLEARED}")


def uids(connection: Connection, study: StudyRow) -> list[str]:
    """Returns the uids under which trackers may have runs of the study: its own, and those of discarded trials."""
    query = select(events.c.fields).where(events.c.study_id == study.id, events.c.kind == SET_ASIDE)
    return [study.uid, *(fields["uid"] for fields in connection.execute(query.order_by(events.c.id)).scalars())]


def mirrored(connection: Connection, study_id: int) -> dict[str, int]:
    """Returns tracker -> the number of runs of the study that are recorded there."""
    query = (
        select(mirrors.c.tracker, func.count().label("runs"))
        .where(mirrors.c.study_id == study_id)
        .group_by(mirrors.c.tracker)
    )
    return {row.tracker: row.runs for row in connection.execute(query.order_by(mirrors.c.tracker))}


def begun_from(connection: Connection, study_id: int | None, field: str) -> dict[str, str]:
    """Returns checkpoint path -> name of the study that begins from it, for studies other than `study_id`.

    The path is the value of `field` in a study's overrides or in a trial's configuration.
    """
    is_other = studies.c.id != study_id if study_id is not None else true()
    other_specs = connection.execute(select(studies.c.name, studies.c.spec).where(is_other))
    name_of = {str(Path(path)): name for name, spec in other_specs if (path := spec.get("overrides", {}).get(field))}
    at = asks.c.config[tuple(field.split("."))].as_string()
    query = select(studies.c.name, at).select_from(asks.join(trials).join(studies))
    rows = connection.execute(query.where(is_other, at.is_not(None)).distinct())
    return name_of | {str(Path(path)): name for name, path in rows}
