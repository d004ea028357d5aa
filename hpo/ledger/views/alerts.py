"""Queries alerts: what has happened since the last look, and which messages are still to be sent.

An alert is a row before it is sent. It is written in the transaction that moves the cursor past its event, so none is
lost or made twice. It is sent from its row, and marked once the answer has arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import and_, bindparam, delete, func, insert, literal, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from hpo.ledger.database.statements import insert_new
from hpo.ledger.database.tables import alert_cursors, alerts, asks, checkpoints, events, reports, trials
from hpo.ledger.read import every
from hpo.ledger.rows import AlertRow, ChangedTrial, Connection, EventRow, TrialRow, ValueRow
from hpo.text import counted

_BEGUN = -1  # the number under which `alert_cursors` records that a study has alerts

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
    select(events)
    .select_from(trials.join(events, events.c.trial_id == trials.c.id).outerjoin(alert_cursors, _cursor))
    .where(_of_trials, events.c.revision > _seen, events.c.kind.in_(bindparam("kinds", expanding=True)))
    .order_by(events.c.id)
)
_skipped = and_(reports.c.key == "train/skipped_steps", reports.c.value > 0)
_NOT_FINITE = (
    select(reports)
    .select_from(trials.join(reports, reports.c.trial_id == trials.c.id).outerjoin(alert_cursors, _cursor))
    .where(_of_trials, reports.c.revision > _seen, or_(reports.c.value.is_(None), _skipped))
    .order_by(reports.c.trial_id, reports.c.step, reports.c.key)
)


# What has happened


def begin(connection: Connection, study_id: int, targets: Sequence[str]) -> None:
    """Begins alerts of the study to `targets`.

    Skips events from times without a declared target, and drops alerts for targets that are no longer declared.
    """
    dropped = (alerts.c.study_id == study_id) & (alerts.c.state == "waiting") & alerts.c.target.not_in(list(targets))
    connection.execute(update(alerts).where(dropped).values(state="dropped"))
    if not targets:
        connection.execute(delete(alert_cursors).where(alert_cursors.c.study_id == study_id))
        return
    first = {"study_id": study_id, "number": _BEGUN, "state": "", "revision": 0}
    if connection.execute(insert_new(connection, alert_cursors), first).rowcount == 1:
        present = select(trials.c.study_id, trials.c.number, trials.c.state, trials.c.revision)
        columns = ["study_id", "number", "state", "revision"]
        connection.execute(insert(alert_cursors).from_select(columns, present.where(trials.c.study_id == study_id)))


def pending(connection: Connection, study_id: int, n: int = 200) -> Sequence[ChangedTrial]:
    """Returns up to `n` trials that have changed since the last look.

    Each has its `params`, its `config`, and the state it `was` in then, None if it did not exist.
    """
    return every(ChangedTrial, connection.execute(_PENDING, {"study": study_id, "n": n}))


def new_events(connection: Connection, trial_ids: Sequence[int], kinds: Sequence[str]) -> Sequence[EventRow]:
    """Returns the events of these kinds, written since the last look at their trial."""
    return every(EventRow, connection.execute(_EVENTS, {"trials": list(trial_ids), "kinds": list(kinds)}))


def new_not_finite(connection: Connection, trial_ids: Sequence[int]) -> Sequence[ValueRow]:
    """Returns the non-finite values, and the counts of skipped steps above 0, reported since the trials' last look."""
    return every(ValueRow, connection.execute(_NOT_FINITE, {"trials": list(trial_ids)}))


def revisions(connection: Connection, study_id: int) -> int:
    """Returns a number that grows with every change of a trial of the study."""
    total = select(func.coalesce(func.sum(trials.c.revision), 0)).where(trials.c.study_id == study_id)
    return int(connection.execute(total).scalar_one())


def kept_bytes(connection: Connection, study_id: int) -> int:
    """Returns the bytes of the study's kept checkpoints."""
    query = select(func.coalesce(func.sum(checkpoints.c.size), 0)).join(trials)
    return int(
        connection.execute(query.where(trials.c.study_id == study_id, checkpoints.c.state == "kept")).scalar_one()
    )


# # Messages


class Alert(NamedTuple):
    """A message to `target`: an event by its name within the study, with the content to send."""

    target: str
    event: str
    content: Mapping[str, Any]
    at: float


@dataclass(frozen=True)
class Trouble:
    """Alerts that a target has not accepted: how many wait, how many it refused, and why the last try failed."""

    waiting: int
    refused: int
    error: str

    def describe(self, target: str) -> str:
        """Returns one sentence about these alerts."""
        number, how = (self.waiting, "not taken yet") if self.waiting else (self.refused, "refused for good")
        was = "was" if number == 1 else "were"
        return f"{counted(number, 'alert')} to {target} {was} {how}: {self.error}."


def write(connection: Connection, study_id: int, new: Sequence[Alert], seen: Sequence[TrialRow] = ()) -> None:
    """Records alerts, each event once per target, and that the trials `seen` were read in these states."""
    if new:
        rows = [
            {"study_id": study_id, "state": "waiting", **alert._asdict(), "content": dict(alert.content)}
            for alert in new
        ]
        connection.execute(insert_new(connection, alerts), rows)
    if seen:
        upsert = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(alert_cursors)
        now = {"state": upsert.excluded.state, "revision": upsert.excluded.revision}
        moved = [
            {"study_id": study_id, "number": row.number, "state": row.state, "revision": row.revision} for row in seen
        ]
        connection.execute(
            upsert.on_conflict_do_update(index_elements=list(alert_cursors.primary_key), set_=now), moved
        )


def waiting(connection: Connection, study_id: int) -> Sequence[AlertRow]:
    """Returns the alerts that have not been accepted yet, oldest first."""
    is_waiting = (alerts.c.study_id == study_id) & (alerts.c.state == "waiting")
    return every(AlertRow, connection.execute(select(alerts).where(is_waiting).order_by(alerts.c.id)))


def bind(connection: Connection, ids: Sequence[int], message: str) -> None:
    """Assigns these alerts to one message, however often it is sent."""
    connection.execute(update(alerts).where(alerts.c.id.in_(list(ids))).values(message=message))


def settle(connection: Connection, ids: Sequence[int], state: str, error: str | None) -> None:
    """Records the result of a try to send these alerts: sent, refused, or still waiting because of `error`."""
    values = {"state": state, "error": error, "tries": alerts.c.tries + literal(1)}
    connection.execute(update(alerts).where(alerts.c.id.in_(list(ids))).values(**values))


def troubles(connection: Connection, study_id: int) -> dict[str, Trouble]:
    """Returns target -> the alerts that it has not accepted although they were tried; omits other targets."""
    tried = (alerts.c.study_id == study_id) & alerts.c.state.in_(("waiting", "refused")) & alerts.c.error.is_not(None)
    trouble_of: dict[str, Trouble] = {}
    for row in every(AlertRow, connection.execute(select(alerts).where(tried).order_by(alerts.c.id))):
        before = trouble_of.get(row.target, Trouble(0, 0, ""))
        refused = row.state == "refused"
        trouble_of[row.target] = Trouble(before.waiting + (not refused), before.refused + refused, row.error or "")
    return trouble_of
