"""Queries of alerts: what has happened since it was last looked for, and what is still to be told to whom.

An alert is a row before it is sent: it is written in the transaction that moves the cursor past what it tells of, so
none is lost or made twice. It is sent from its row, and marked once the answer is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import and_, bindparam, delete, func, insert, literal, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from hpo.ledger.rows import Connection, RowMapping
from hpo.ledger.statements import insert_new
from hpo.ledger.tables import alert_cursors, alerts, asks, checkpoints, events, reports, trials
from hpo.text import counted

_BEGUN = -1  # the number under which `alert_cursors` says that a study has alerts

_cursor = and_(alert_cursors.c.study_id == trials.c.study_id, alert_cursors.c.number == trials.c.number)
_seen = func.coalesce(alert_cursors.c.revision, 0)
_of_trials = trials.c.id.in_(bindparam("trials", expanding=True))
_PENDING = (
    select(trials, asks.c.params, asks.c.config, alert_cursors.c.state.label("was"))
    .select_from(trials.join(asks).outerjoin(alert_cursors, _cursor))
    .where(trials.c.study_id == bindparam("study"), trials.c.revision > _seen)
    .order_by(trials.c.number)
    .limit(bindparam("n"))
)
_EVENTS = (
    select(events.c.trial_id, events.c.kind, events.c.fields, events.c.uid)
    .select_from(trials.join(events, events.c.trial_id == trials.c.id).outerjoin(alert_cursors, _cursor))
    .where(_of_trials, events.c.revision > _seen, events.c.kind.in_(bindparam("kinds", expanding=True)))
    .order_by(events.c.id)
)
_skipped = and_(reports.c.key == "train/skipped_steps", reports.c.value > 0)
_NOT_FINITE = (
    select(reports.c.trial_id, reports.c.key, reports.c.step, reports.c.value)
    .select_from(trials.join(reports, reports.c.trial_id == trials.c.id).outerjoin(alert_cursors, _cursor))
    .where(_of_trials, reports.c.revision > _seen, or_(reports.c.value.is_(None), _skipped))
    .order_by(reports.c.trial_id, reports.c.step, reports.c.key)
)


# What has happened


def begin(connection: Connection, study_id: int, targets: Sequence[str]) -> None:
    """The study has alerts, to `targets`: what came before the first of them is not told, nor what comes while there
    are none, and what waits for a target that is declared no more is dropped."""
    dropped = (alerts.c.study_id == study_id) & (alerts.c.state == "waiting") & alerts.c.target.not_in(list(targets))
    connection.execute(update(alerts).where(dropped).values(state="dropped"))
    if not targets:
        connection.execute(delete(alert_cursors).where(alert_cursors.c.study_id == study_id))
        return
    first = {"study_id": study_id, "number": _BEGUN, "state": "", "revision": 0}
    if connection.execute(insert_new(connection, alert_cursors), first).rowcount == 1:
        there = select(trials.c.study_id, trials.c.number, trials.c.state, trials.c.revision)
        columns = ["study_id", "number", "state", "revision"]
        connection.execute(insert(alert_cursors).from_select(columns, there.where(trials.c.study_id == study_id)))


def pending(connection: Connection, study_id: int, n: int = 200) -> Sequence[RowMapping]:
    """Up to `n` trials that have changed since they were looked at: each with its `params`, its `config`, the state it
    `was` in then, None where it was not there."""
    return connection.execute(_PENDING, {"study": study_id, "n": n}).mappings().all()


def new_events(connection: Connection, trial_ids: Sequence[int], kinds: Sequence[str]) -> Sequence[RowMapping]:
    """The events of these kinds, written since their trial was looked at: `trial_id`, `kind`, `fields` and `uid`."""
    return connection.execute(_EVENTS, {"trials": list(trial_ids), "kinds": list(kinds)}).mappings().all()


def new_not_finite(connection: Connection, trial_ids: Sequence[int]) -> Sequence[RowMapping]:
    """The values that are none, and the counts of skipped steps above 0, reported since their trial was looked at:
    `trial_id`, `key`, `step`, and `value`, which is None for NaN."""
    return connection.execute(_NOT_FINITE, {"trials": list(trial_ids)}).mappings().all()


def revisions(connection: Connection, study_id: int) -> int:
    """A number that grows with whatever happens to a trial of the study."""
    total = select(func.coalesce(func.sum(trials.c.revision), 0)).where(trials.c.study_id == study_id)
    return int(connection.execute(total).scalar_one())


def kept_bytes(connection: Connection, study_id: int) -> int:
    """What the study's kept checkpoints take."""
    query = select(func.coalesce(func.sum(checkpoints.c.size), 0)).join(trials)
    return int(
        connection.execute(query.where(trials.c.study_id == study_id, checkpoints.c.state == "kept")).scalar_one()
    )


# What is to be told


class Alert(NamedTuple):
    """What is to be told to `target`: an event by its name within the study, as it is sent."""

    target: str
    event: str
    content: Mapping[str, Any]
    at: float


@dataclass(frozen=True)
class Trouble:
    """Alerts that a target has not taken: how many wait, how many it refused for good, and why the last try failed."""

    waiting: int
    refused: int
    error: str

    def describe(self, target: str) -> str:
        """In one sentence."""
        number, how = (self.waiting, "not taken yet") if self.waiting else (self.refused, "refused for good")
        was = "was" if number == 1 else "were"
        return f"{counted(number, 'alert')} to {target} {was} {how}: {self.error}."


def write(connection: Connection, study_id: int, new: Sequence[Alert], seen: Sequence[RowMapping] = ()) -> None:
    """Record alerts, each event once for a target, and that the trials `seen` were looked at, as they were read."""
    if new:
        rows = [
            {"study_id": study_id, "state": "waiting", **one._asdict(), "content": dict(one.content)} for one in new
        ]
        connection.execute(insert_new(connection, alerts), rows)
    if seen:
        upsert = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(alert_cursors)
        now = {"state": upsert.excluded.state, "revision": upsert.excluded.revision}
        moved = [
            {"study_id": study_id, "number": row["number"], "state": row["state"], "revision": row["revision"]}
            for row in seen
        ]
        connection.execute(
            upsert.on_conflict_do_update(index_elements=list(alert_cursors.primary_key), set_=now), moved
        )


def waiting(connection: Connection, study_id: int) -> Sequence[RowMapping]:
    """What has not been taken yet, in the order in which it came."""
    mine = (alerts.c.study_id == study_id) & (alerts.c.state == "waiting")
    return connection.execute(select(alerts).where(mine).order_by(alerts.c.id)).mappings().all()


def bind(connection: Connection, ids: Sequence[int], message: str) -> None:
    """These alerts go with one message, however often it is sent."""
    connection.execute(update(alerts).where(alerts.c.id.in_(list(ids))).values(message=message))


def settle(connection: Connection, ids: Sequence[int], state: str, error: str | None) -> None:
    """A try to send these alerts is over: they are sent, refused, or still waiting, because of `error`."""
    values = {"state": state, "error": error, "tries": alerts.c.tries + literal(1)}
    connection.execute(update(alerts).where(alerts.c.id.in_(list(ids))).values(**values))


def troubles(connection: Connection, study_id: int) -> dict[str, Trouble]:
    """Target -> what it has not taken although that was tried; without the targets that have taken all."""
    mine = (alerts.c.study_id == study_id) & alerts.c.state.in_(("waiting", "refused")) & alerts.c.error.is_not(None)
    found: dict[str, Trouble] = {}
    for row in connection.execute(select(alerts).where(mine).order_by(alerts.c.id)).mappings():
        before = found.get(row["target"], Trouble(0, 0, ""))
        refused = row["state"] == "refused"
        found[row["target"]] = Trouble(before.waiting + (not refused), before.refused + refused, row["error"])
    return found
