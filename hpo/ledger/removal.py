"""Takes a study, or its trials, out of the ledger. Bodies for `Ledger.transact`, under the study's lease.

A study that is being removed is marked first: what `hpo rm` was killed in the middle of is never driven, mirrored or
taken for whole again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import bindparam, delete, func, select, true, update

from hpo.errors import StudyError
from hpo.ledger.process_id import Process
from hpo.ledger.rows import Connection, RowMapping
from hpo.ledger.tables import (
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
    workers,
)
from hpo.ledger.transactions import note
from hpo.text import command

REMOVING = "removing"  # a state of studies
SET_ASIDE = "set_aside"  # an event: trials without a value that a change of the declaration has replaced
CLEARED = "set_aside_cleared"  # an event: their files are removed
_KEPT_EVENTS = (SET_ASIDE, CLEARED)

_OF_TRIALS = (asks, attempts, reports, decisions, checkpoints)

_RUNNING = (
    select(trials.c.number, workers.c.host, workers.c.pid)
    .join(attempts, (attempts.c.trial_id == trials.c.id) & (attempts.c.fence == trials.c.fence))
    .join(workers, workers.c.id == attempts.c.worker_id)
    .where(trials.c.state == "running", trials.c.study_id == bindparam("study"))
    .order_by(trials.c.number)
)


def running(connection: Connection, study_id: int) -> Sequence[RowMapping]:
    """The trials that are being trained: `number`, and `host` and `pid` of the worker."""
    return connection.execute(_RUNNING, {"study": study_id}).mappings().all()


def check_whole(study: Mapping[str, Any] | RowMapping) -> None:
    """Raise StudyError for a study whose removal was cut short."""
    if study["state"] == REMOVING:
        again = command(f"rm --study {study['name']}")
        raise StudyError(f"study {study['name']!r} is half removed: `{again}` finishes that; then the name is free.")


def contents(connection: Connection, study_id: int) -> dict[str, int]:
    """How much a study holds: `trials`, kept `checkpoints` and their `bytes`."""
    mine = trials.c.study_id == study_id
    size = func.coalesce(func.sum(checkpoints.c.size), 0)
    kept = select(func.count(), size).join(trials).where(mine, checkpoints.c.state == "kept")
    count, total = connection.execute(kept.select_from(checkpoints)).one()
    number = connection.execute(select(func.count()).select_from(trials).where(mine)).scalar_one()
    return {"trials": number, "checkpoints": count, "bytes": int(total)}


def mark(connection: Connection, study_id: int, home: str, me: Process) -> None:
    """From here on the study is being removed, from this home on this host."""
    row = connection.execute(select(studies.c.environment).where(studies.c.id == study_id)).scalar_one()
    values = {"state": REMOVING, "environment": row | {"removed_from": [me.host, home]}}
    connection.execute(update(studies).where(studies.c.id == study_id).values(**values))


def erase(connection: Connection, study_id: int) -> None:
    """Delete the study, all that is of it and its leases."""
    erase_trials(connection, study_id)
    connection.execute(delete(events).where(events.c.study_id == study_id))
    own = leases.c.name.endswith(f":{study_id}") | leases.c.name.like(f"mirror:{study_id}:%")
    connection.execute(delete(leases).where(own))
    connection.execute(delete(tags).where(tags.c.study_id == study_id))
    connection.execute(delete(studies).where(studies.c.id == study_id))


def erase_trials(connection: Connection, study_id: int) -> None:
    """Delete the trials, all that is of them, and what is known of them in trackers."""
    mine = select(trials.c.id).where(trials.c.study_id == study_id)
    for table in _OF_TRIALS:
        connection.execute(delete(table).where(table.c.trial_id.in_(mine)))
    connection.execute(delete(events).where(events.c.study_id == study_id, events.c.trial_id.is_not(None)))
    for table in (mirrors, alerts, alert_cursors):
        connection.execute(delete(table).where(table.c.study_id == study_id))
    connection.execute(delete(tags).where(tags.c.study_id == study_id, tags.c.number >= 0))
    connection.execute(delete(trials).where(trials.c.study_id == study_id))


def set_aside(connection: Connection, study: RowMapping, values: Mapping[str, Any], changed: list[str]) -> int:
    """Take the trials out and let the study be begun anew, with `values`, among them a new uid, by which neither
    trackers nor a bucket take what is new for what was there. An event keeps what the trials came to; their number."""
    if connection.execute(select(studies.c.uid).where(studies.c.id == study["id"])).scalar() == values["uid"]:
        kept = select(events.c.fields).where(events.c.uid == f"{study['uid']}.{SET_ASIDE}")
        return len(connection.execute(kept).scalar_one()["trials"])  # a retried commit that had gone through
    query = select(trials.c.number, trials.c.state, trials.c.error, asks.c.params).join(asks)
    found = connection.execute(query.where(trials.c.study_id == study["id"]).order_by(trials.c.number)).mappings()
    fields = {"uid": study["uid"], "changed": changed, "trials": [dict(row) for row in found]}
    erase_trials(connection, study["id"])
    connection.execute(delete(events).where(events.c.study_id == study["id"], events.c.kind.not_in(_KEPT_EVENTS)))
    anew = {"state": "open", "seconds_used": 0.0, "revision": studies.c.revision + 1}
    connection.execute(update(studies).where(studies.c.id == study["id"]).values(**anew, **values))
    note(connection, study["id"], SET_ASIDE, fields, f"{study['uid']}.{SET_ASIDE}")
    return len(fields["trials"])


def uncleared(connection: Connection, study_id: int) -> list[str]:
    """The uids of what was set aside and whose files have not been removed yet."""
    query = select(events.c.kind, events.c.fields).where(events.c.study_id == study_id, events.c.kind.in_(_KEPT_EVENTS))
    found = [(kind, fields["uid"]) for kind, fields in connection.execute(query.order_by(events.c.id))]
    return [uid for kind, uid in found if kind == SET_ASIDE and (CLEARED, uid) not in found]


def cleared(connection: Connection, study_id: int, uid: str) -> None:
    """The files of what was set aside are removed."""
    note(connection, study_id, CLEARED, {"uid": uid}, f"{uid}.{CLEARED}")


def uids(connection: Connection, study: RowMapping) -> list[str]:
    """The uids under which trackers may have runs of the study: its own, and those of what was set aside."""
    query = select(events.c.fields).where(events.c.study_id == study["id"], events.c.kind == SET_ASIDE)
    return [study["uid"], *(fields["uid"] for fields in connection.execute(query.order_by(events.c.id)).scalars())]


def mirrored(connection: Connection, study_id: int) -> dict[str, int]:
    """Tracker -> how many runs of the study are recorded there."""
    query = (
        select(mirrors.c.tracker, func.count().label("runs"))
        .where(mirrors.c.study_id == study_id)
        .group_by(mirrors.c.tracker)
    )
    return {row.tracker: row.runs for row in connection.execute(query.order_by(mirrors.c.tracker))}


def begun_from(connection: Connection, study_id: int | None, field: str) -> dict[str, str]:
    """Path -> the study, another one than that of `study_id`, that begins from it, by `field` of its overrides or of a
    trial's configuration."""
    other = studies.c.id != study_id if study_id is not None else true()
    others = connection.execute(select(studies.c.name, studies.c.spec).where(other))
    found = {str(Path(path)): name for name, spec in others if (path := spec.get("overrides", {}).get(field))}
    at = asks.c.config[tuple(field.split("."))].as_string()
    query = select(studies.c.name, at).select_from(asks.join(trials).join(studies))
    rows = connection.execute(query.where(other, at.is_not(None)).distinct())
    return found | {str(Path(path)): name for name, path in rows}
