"""Queries the ends of all trials of a study: why each was stopped, and which of its checkpoints is kept."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.engine import Connection

from hpo.ledger.database.tables import checkpoints, decisions, trials


def stop_reasons(connection: Connection, study_id: int, trial_ids: Sequence[int] = ()) -> dict[int, str]:
    """Returns trial id -> the reason of the last decision that stopped or paused it, for the given trials or for all.

    A trial that a strategy has paused and never continued ends without a decision of its own.
    """
    query = (
        select(decisions.c.trial_id, decisions.c.reason)
        .join(trials, trials.c.id == decisions.c.trial_id)
        .where(trials.c.study_id == study_id, decisions.c.verdict.in_(("stop", "pause")))
        .order_by(decisions.c.trial_id, decisions.c.step)
    )
    query = query.where(decisions.c.trial_id.in_(trial_ids)) if trial_ids else query
    return {row.trial_id: row.reason for row in connection.execute(query)}


def kept(connection: Connection, study_id: int) -> dict[int, tuple[str, int]]:
    """Returns trial id -> the name and the epoch of the best kept checkpoint, else of the newest."""
    query = (
        select(checkpoints.c.trial_id, checkpoints.c.path, checkpoints.c.epoch)
        .join(trials, trials.c.id == checkpoints.c.trial_id)
        .where(trials.c.study_id == study_id, checkpoints.c.state == "kept")
        .order_by(checkpoints.c.trial_id, checkpoints.c.best, checkpoints.c.step)
    )
    return {row.trial_id: (row.path, row.epoch) for row in connection.execute(query)}
