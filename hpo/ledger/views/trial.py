"""Queries one trial: its ask, its ancestors, attempts, checkpoints, decisions, events and folds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, Table, bindparam, func, select

from hpo.ledger.database.tables import asks, attempts, checkpoints, decisions, events, reports, trials, workers
from hpo.ledger.read import every, first
from hpo.ledger.rows import AttemptRow, CheckpointRow, ConfiguredTrial, Connection, DecisionRow, EventRow, ValueRow


def _of_trial(table: Table) -> Select[*tuple[Any, ...]]:
    return select(table).where(table.c.trial_id == bindparam("trial"))


_FOLDS = (
    _of_trial(reports)
    .where(reports.c.fold > 0, reports.c.key.in_(bindparam("metrics", expanding=True)))
    .order_by(reports.c.fold, reports.c.step)
)
_ATTEMPTS = (
    _of_trial(attempts)
    .add_columns(workers.c.host, workers.c.pid, workers.c.pid_started)
    .join(workers, workers.c.id == attempts.c.worker_id)
    .order_by(attempts.c.fence)
)
_CHECKPOINTS = _of_trial(checkpoints).order_by(checkpoints.c.step, checkpoints.c.id)
_DECISIONS = _of_trial(decisions).where(decisions.c.verdict != "continue").order_by(decisions.c.step, decisions.c.fold)
_EVENTS = _of_trial(events).order_by(events.c.at, events.c.id)


def find_trial(connection: Connection, study_id: int, number: int) -> ConfiguredTrial | None:
    """Returns the trial's row and its ask's `params`, `config`, `config_hash` and `trial_attrs`, if it exists."""
    query = (
        select(trials, asks.c.params, asks.c.config_hash, asks.c.config, asks.c.trial_attrs)
        .join(asks, asks.c.trial_id == trials.c.id)
        .where(trials.c.study_id == study_id, trials.c.number == number)
    )
    return first(ConfiguredTrial, connection.execute(query))


def there(connection: Connection, study_id: int) -> str:
    """Returns a clause about which trials a study has: `it has trials 0 to 9`."""
    count = connection.execute(select(func.count()).select_from(trials).where(trials.c.study_id == study_id)).scalar()
    return f"it has trials 0 to {count - 1}" if count else "it has none yet"


def held(connection: Connection, study_id: int, number: int) -> tuple[int, int]:
    """Returns the id of an existing trial, and the fence of its newest attempt."""
    this_trial = (trials.c.study_id == study_id) & (trials.c.number == number)
    row = connection.execute(select(trials.c.id, trials.c.fence).where(this_trial)).one()
    return row.id, row.fence


def ancestors(connection: Connection, study_id: int, parent: int | None) -> list[int]:
    """Returns the ancestors, by number, of a trial with this parent, the parent first."""
    numbers: list[int] = []
    while parent is not None and parent not in numbers:
        numbers.append(parent)
        where = (trials.c.study_id == study_id) & (trials.c.number == parent)
        parent = connection.execute(select(trials.c.parent).where(where)).scalar()
    return numbers


def attempts_of(connection: Connection, trial_id: int) -> Sequence[AttemptRow]:
    """Returns the trial's attempts by fence, with the worker's host and pid."""
    return every(AttemptRow, connection.execute(_ATTEMPTS, {"trial": trial_id}))


def checkpoints_of(connection: Connection, trial_id: int) -> Sequence[CheckpointRow]:
    """Returns the trial's checkpoints by step, including dropped or damaged ones."""
    return every(CheckpointRow, connection.execute(_CHECKPOINTS, {"trial": trial_id}))


def decisions_of(connection: Connection, trial_id: int) -> Sequence[DecisionRow]:
    """Returns the decisions on the trial by step and fold, except those to continue."""
    return every(DecisionRow, connection.execute(_DECISIONS, {"trial": trial_id}))


def events_of(connection: Connection, trial_id: int) -> Sequence[EventRow]:
    """Returns the trial's events in the order of their times."""
    return every(EventRow, connection.execute(_EVENTS, {"trial": trial_id}))


def folds_of(connection: Connection, trial_id: int, metrics: Sequence[str]) -> Sequence[ValueRow]:
    """Returns the reports of folds above 0 of these metrics: `fold`, `key`, `step` and `value`, by fold and step."""
    return every(ValueRow, connection.execute(_FOLDS, {"trial": trial_id, "metrics": list(metrics)}))
