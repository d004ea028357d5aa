"""Queries of one trial: what was asked, its ancestors, attempts, checkpoints, decisions, events and folds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Column, Select, Table, bindparam, func, select

from hpo.ledger.rows import Connection, RowMapping
from hpo.ledger.tables import asks, attempts, checkpoints, decisions, events, reports, trials, workers


def _of_trial(table: Table, *columns: Column[Any]) -> Select[*tuple[Any, ...]]:
    return select(*columns).where(table.c.trial_id == bindparam("trial"))


_FOLDS = (
    _of_trial(reports, reports.c.fold, reports.c.key, reports.c.step, reports.c.value)
    .where(reports.c.fold > 0, reports.c.key.in_(bindparam("metrics", expanding=True)))
    .order_by(reports.c.fold, reports.c.step)
)
_ATTEMPTS = (
    _of_trial(
        attempts,
        attempts.c.fence,
        attempts.c.from_step,
        attempts.c.step,
        attempts.c.outcome,
        attempts.c.started_at,
        attempts.c.ended_at,
        workers.c.host,
        workers.c.pid,
    )
    .join(workers, workers.c.id == attempts.c.worker_id)
    .order_by(attempts.c.fence)
)
_CHECKPOINTS = _of_trial(
    checkpoints,
    checkpoints.c.step,
    checkpoints.c.epoch,
    checkpoints.c.path,
    checkpoints.c.state,
    checkpoints.c.best,
    checkpoints.c.size,
    checkpoints.c.sha256,
    checkpoints.c.metrics,
).order_by(checkpoints.c.step, checkpoints.c.id)
_DECISIONS = (
    _of_trial(
        decisions, decisions.c.step, decisions.c.fold, decisions.c.verdict, decisions.c.strategy, decisions.c.reason
    )
    .where(decisions.c.verdict != "continue")
    .order_by(decisions.c.step, decisions.c.fold)
)
_EVENTS = _of_trial(events, events.c.kind, events.c.fields, events.c.at).order_by(events.c.at, events.c.id)


def find_trial(connection: Connection, study_id: int, number: int) -> RowMapping | None:
    """The trial's row and its ask's `params`, `config`, `config_hash` and `trial_attrs`, if there is such a trial."""
    query = (
        select(trials, asks.c.params, asks.c.config, asks.c.config_hash, asks.c.trial_attrs)
        .join(asks, asks.c.trial_id == trials.c.id)
        .where(trials.c.study_id == study_id, trials.c.number == number)
    )
    return connection.execute(query).mappings().first()


def there(connection: Connection, study_id: int) -> str:
    """Which trials a study has, as a clause: `it has trials 0 to 9`."""
    count = connection.execute(select(func.count()).select_from(trials).where(trials.c.study_id == study_id)).scalar()
    return f"it has trials 0 to {count - 1}" if count else "it has none yet"


def held(connection: Connection, study_id: int, number: int) -> tuple[int, int]:
    """The id of a trial that is there, and the fence of its newest attempt."""
    mine = (trials.c.study_id == study_id) & (trials.c.number == number)
    row = connection.execute(select(trials.c.id, trials.c.fence).where(mine)).one()
    return row.id, row.fence


def ancestors(connection: Connection, study_id: int, parent: int | None) -> list[int]:
    """The trials, by number, that one with this parent descends from, the parent first."""
    found: list[int] = []
    while parent is not None and parent not in found:
        found.append(parent)
        where = (trials.c.study_id == study_id) & (trials.c.number == parent)
        parent = connection.execute(select(trials.c.parent).where(where)).scalar()
    return found


def attempts_of(connection: Connection, trial_id: int) -> Sequence[RowMapping]:
    """The trial's attempts by fence, with the worker's host and pid."""
    return connection.execute(_ATTEMPTS, {"trial": trial_id}).mappings().all()


def checkpoints_of(connection: Connection, trial_id: int) -> Sequence[RowMapping]:
    """The trial's checkpoints by step, also those that are dropped or damaged."""
    return connection.execute(_CHECKPOINTS, {"trial": trial_id}).mappings().all()


def decisions_of(connection: Connection, trial_id: int) -> Sequence[RowMapping]:
    """What was decided of the trial by step and fold, but for that it goes on."""
    return connection.execute(_DECISIONS, {"trial": trial_id}).mappings().all()


def events_of(connection: Connection, trial_id: int) -> Sequence[RowMapping]:
    """The trial's events in the order of their times."""
    return connection.execute(_EVENTS, {"trial": trial_id}).mappings().all()


def folds_of(connection: Connection, trial_id: int, metrics: Sequence[str]) -> Sequence[RowMapping]:
    """What folds above 0 have reported of these metrics: `fold`, `key`, `step` and `value`, by fold and step."""
    return connection.execute(_FOLDS, {"trial": trial_id, "metrics": list(metrics)}).mappings().all()
