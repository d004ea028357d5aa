"""Marks the trials that `hpo rm N` has removed.

Their rows stay for the sampler, the digest and resumption. An event hides them from displays; a second event records
that their files and runs are gone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import exists, func, select, update

from hpo.errors import UserError
from hpo.ledger.database import statements as sql
from hpo.ledger.database.tables import attempts, checkpoints, events, studies, trials
from hpo.ledger.rows import Connection, StudyRow

REMOVED = "trial_removed"  # an event: nothing shows the trial any more
FREED = "trial_freed"  # an event: its files and runs are gone

_MARK = exists().where(
    events.c.study_id == trials.c.study_id, events.c.trial_id == trials.c.id, events.c.kind == REMOVED
)
is_removed = _MARK.correlate(trials)
is_shown = ~is_removed


@dataclass(frozen=True)
class Removed:
    """The number of removed trials by state, and the training that they had cost."""

    states: dict[str, int] = field(default_factory=dict[str, int])
    epochs: int = 0
    seconds: float = 0.0  # in attempts

    @property
    def count(self) -> int:
        return sum(self.states.values())


def numbers(connection: Connection, study_id: int, kind: str = REMOVED) -> set[int]:
    """Returns the numbers of the removed trials or, with the kind FREED, of the trials whose files are gone too."""
    query = select(trials.c.number).join(events, events.c.trial_id == trials.c.id)
    return set(connection.execute(query.where(events.c.study_id == study_id, events.c.kind == kind)).scalars())


def check_shown(connection: Connection, study: StudyRow, number: int, why: str) -> None:
    """Raises UserError, giving `why`, for a removed trial."""
    if number in numbers(connection, study.id):
        raise UserError(f"trial {number} of study {study.name!r} is removed: {why}.")


def cost(connection: Connection, study_id: int) -> Removed:
    """Returns the removed trials of the study by state, and their cost."""
    of_removed = (trials.c.study_id == study_id) & is_removed
    trained = func.coalesce(func.sum(trials.c.epoch - trials.c.from_epoch), 0)
    by_state = select(trials.c.state, func.count(), trained).where(of_removed).group_by(trials.c.state)
    rows = connection.execute(by_state).all()
    if not rows:
        return Removed()
    seconds = func.sum(attempts.c.ended_at - attempts.c.started_at)
    spent = connection.execute(select(seconds).select_from(attempts.join(trials)).where(of_removed)).scalar_one()
    return Removed({state: count for state, count, _ in rows}, sum(epochs for *_, epochs in rows), spent or 0.0)


def contents(connection: Connection, study_id: int, chosen: Sequence[int]) -> dict[str, int]:
    """Returns how many `checkpoints` the chosen trials keep, and their `bytes`."""
    size = func.coalesce(func.sum(checkpoints.c.size), 0)
    kept = select(func.count(), size).select_from(checkpoints.join(trials)).where(checkpoints.c.state == "kept")
    chosen_ones = (trials.c.study_id == study_id) & trials.c.number.in_(list(chosen))
    number, total = connection.execute(kept.where(chosen_ones)).one()
    return {"checkpoints": number, "bytes": int(total)}


def kept_paths(connection: Connection, trial_id: int) -> list[str]:
    """Returns the paths of the checkpoints that a trial keeps."""
    kept = (checkpoints.c.trial_id == trial_id) & (checkpoints.c.state == "kept")
    return list(connection.execute(select(checkpoints.c.path).where(kept).order_by(checkpoints.c.id)).scalars())


def mark(connection: Connection, study: StudyRow, number: int, kind: str = REMOVED) -> None:
    """Records that a trial is removed, or FREED, so that trackers send the study's own run again.

    Repeating it changes nothing.
    """
    if number in numbers(connection, study.id, kind):
        return
    raised = update(trials).where(trials.c.study_id == study.id, trials.c.number == number)
    raised = raised.values(revision=trials.c.revision + 1).returning(trials.c.id, trials.c.revision)
    trial_id, revision = connection.execute(raised).one()
    of_study = update(studies).where(studies.c.id == study.id).values(revision=studies.c.revision + 1)
    connection.execute(of_study)
    row: dict[str, Any] = {"study_id": study.id, "trial_id": trial_id, "kind": kind, "revision": revision}
    row |= {"fields": {}, "uid": f"{study.uid}/{number}.{kind}", "at": time.time()}
    connection.execute(sql.insert_new(connection, events), row)
