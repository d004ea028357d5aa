"""Queries of how all trials of a study have ended: why each was stopped, and which checkpoint is kept of it."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.engine import Connection

from hpo.ledger.tables import checkpoints, decisions, trials


def stop_reasons(connection: Connection, study_id: int, trial_ids: Sequence[int] = ()) -> dict[int, str]:
    """Trial id -> the reason of the last decision that stopped it; of the trials given, or of all."""
    query = (
        select(decisions.c.trial_id, decisions.c.reason)
        .join(trials, trials.c.id == decisions.c.trial_id)
        .where(trials.c.study_id == study_id, decisions.c.verdict == "stop")
        .order_by(decisions.c.trial_id, decisions.c.step)
    )
    query = query.where(decisions.c.trial_id.in_(trial_ids)) if trial_ids else query
    return {row.trial_id: row.reason for row in connection.execute(query)}


def kept_paths(connection: Connection, study_id: int) -> dict[int, str]:
    """Trial id -> the name of its best checkpoint of those kept, else of the newest."""
    query = (
        select(checkpoints.c.trial_id, checkpoints.c.path)
        .join(trials, trials.c.id == checkpoints.c.trial_id)
        .where(trials.c.study_id == study_id, checkpoints.c.state == "kept")
        .order_by(checkpoints.c.trial_id, checkpoints.c.best, checkpoints.c.step)
    )
    return {row.trial_id: row.path for row in connection.execute(query)}
