"""Queries the files of trials: checkpoints, artifacts, and the ended trials that have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, bindparam, case, func, select, update

from hpo.ledger.database import statements as sql
from hpo.ledger.database.tables import checkpoints, events, trials
from hpo.ledger.queries import PAGE
from hpo.ledger.read import by_trial, every
from hpo.ledger.removed import is_shown
from hpo.ledger.rows import CheckpointRow, Connection, TrialCheckpoint, TrialRow
from hpo.space.trial_state import TERMINAL_STATES

_KEPT = (
    select(checkpoints)
    .where(checkpoints.c.trial_id.in_(bindparam("trials", expanding=True)), checkpoints.c.state == "kept")
    .order_by(checkpoints.c.step, checkpoints.c.id)
)
_ENDED = (
    select(trials.c.number)
    .where(
        trials.c.study_id == bindparam("study"),
        trials.c.number >= bindparam("first"),
        trials.c.state.in_(TERMINAL_STATES),
        is_shown,
    )
    .order_by(trials.c.number)
)


# Trials


def ended_from(connection: Connection, study_id: int, first: int) -> Sequence[int]:
    """Returns the numbers, from `first` on, of the trials that have ended."""
    return connection.execute(_ENDED, {"study": study_id, "first": first}).scalars().all()


def ended(connection: Connection, study_id: int) -> Sequence[TrialRow]:
    """Returns the rows of all trials that have ended."""
    has_ended = (trials.c.study_id == study_id) & trials.c.state.in_(TERMINAL_STATES)
    return every(TrialRow, connection.execute(select(trials).where(has_ended)))


def newest_generations(connection: Connection, study_id: int) -> set[int]:
    """Returns the numbers of the trials of a population's last two generations."""
    of_study = trials.c.study_id == study_id
    newest = select(func.max(trials.c.generation)).where(of_study).scalar_subquery()
    return set(connection.execute(select(trials.c.number).where(of_study, trials.c.generation >= newest - 1)).scalars())


# Checkpoints


def kept(connection: Connection, trial_ids: Sequence[int]) -> dict[int, list[CheckpointRow]]:
    """Returns trial id -> its kept checkpoints, the oldest first."""
    return by_trial(every(CheckpointRow, connection.execute(_KEPT, {"trials": list(trial_ids)})))


def kept_of_study(connection: Connection, study_id: int) -> Sequence[TrialCheckpoint]:
    """Returns every kept checkpoint by trial, the oldest first, with the trial's `number` and its state as
    `trial_state`."""
    query = (
        select(checkpoints, trials.c.number, trials.c.state.label("trial_state"))
        .join(trials, trials.c.id == checkpoints.c.trial_id)
        .where(trials.c.study_id == study_id, checkpoints.c.state == "kept")
        .order_by(trials.c.number, checkpoints.c.step, checkpoints.c.id)
    )
    return every(TrialCheckpoint, connection.execute(query))


def kept_paths(connection: Connection, study_id: int) -> dict[int, list[str]]:
    """Returns trial id -> the paths of its kept checkpoints, for the trials that have ended."""
    query = (
        select(checkpoints.c.trial_id, checkpoints.c.path)
        .join(trials)
        .where(checkpoints.c.state == "kept", trials.c.state.in_(TERMINAL_STATES), trials.c.study_id == study_id)
    )
    paths: dict[int, list[str]] = {}
    for trial_id, path in connection.execute(query):
        paths.setdefault(trial_id, []).append(path)
    return paths


def needed(connection: Connection, study_id: int, sources: Sequence[str]) -> Iterator[str]:
    """Yields the checkpoints among these, each as `<trial number>/<path>`, that open trials start from or a backup
    holds."""
    for start in range(0, len(sources), PAGE):
        where = {"study": study_id, "sources": list(sources[start : start + PAGE])}
        yield from connection.execute(sql.NEEDED_OR_HELD, where).scalars()


def drop(
    connection: Connection, study_id: int, number: int, trial_id: int, paths: Sequence[str], *, lost: bool = False
) -> bool:
    """Marks checkpoints of a trial as deleted; returns False, changing nothing, if an open trial starts from one of
    them or a backup holds one. It holds none that is `lost` anyway.

    The rows are locked first, so that a transaction which is about to need one waits for this.
    """
    connection.execute(sql.LOCK_CHECKPOINTS, {"trial": trial_id, "paths": list(paths)})
    sources = [f"{number}/{path}" for path in paths]
    needed_here = sql.NEEDED if lost else sql.NEEDED_OR_HELD
    if connection.execute(needed_here, {"study": study_id, "sources": sources}).first() is not None:
        return False
    raised = update(trials).where(trials.c.id == trial_id).values(revision=trials.c.revision + 1)
    revision = connection.execute(raised.returning(trials.c.revision)).scalar_one()
    these_checkpoints = (checkpoints.c.trial_id == trial_id) & checkpoints.c.path.in_(paths)
    connection.execute(update(checkpoints).where(these_checkpoints).values(state="deleted", revision=revision))
    return True


def rank_again(connection: Connection, trial_id: int, best: str | None) -> None:
    """Flags this checkpoint of a trial as its best one, and no other; none without a path.

    All that are kept get the trial's revision, so that trackers learn which is the best and which the last one now.
    """
    kept_rows = update(checkpoints).where(checkpoints.c.trial_id == trial_id, checkpoints.c.state == "kept")
    revision = select(trials.c.revision).where(trials.c.id == trial_id).scalar_subquery()
    connection.execute(kept_rows.values(best=case((checkpoints.c.path == best, 1), else_=0), revision=revision))


# Artifacts


def artifacts(connection: Connection, trial_id: int) -> Sequence[Mapping[str, Any]]:
    """Returns the fields of the trial's artifact events, in their order."""
    return _artifacts(connection, events.c.trial_id == trial_id)


def artifacts_of_study(connection: Connection, study_id: int) -> Sequence[Mapping[str, Any]]:
    """Returns the fields of the study's artifact events that belong to no trial, in their order."""
    return _artifacts(connection, (events.c.study_id == study_id) & events.c.trial_id.is_(None))


def _artifacts(connection: Connection, mine: ColumnElement[bool]) -> Sequence[Mapping[str, Any]]:
    query = select(events.c.fields).where(mine, events.c.kind == "artifact").order_by(events.c.id)
    return connection.execute(query).scalars().all()
