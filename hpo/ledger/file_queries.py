"""Queries of what trials keep as files: checkpoints, artifacts, and the trials that have ended with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, bindparam, func, select, update

from hpo.ledger import statements as sql
from hpo.ledger.queries import PAGE
from hpo.ledger.rows import Connection, RowMapping, by_trial
from hpo.ledger.tables import checkpoints, events, trials
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
    )
    .order_by(trials.c.number)
)


# Trials


def ended_from(connection: Connection, study_id: int, first: int) -> Sequence[int]:
    """The numbers, from `first` on, of the trials that have ended."""
    return connection.execute(_ENDED, {"study": study_id, "first": first}).scalars().all()


def ended(connection: Connection, study_id: int) -> Sequence[RowMapping]:
    """The rows of all trials that have ended."""
    mine = (trials.c.study_id == study_id) & trials.c.state.in_(TERMINAL_STATES)
    return connection.execute(select(trials).where(mine)).mappings().all()


def newest_generations(connection: Connection, study_id: int) -> set[int]:
    """The numbers of the trials of a population's last two generations."""
    mine = trials.c.study_id == study_id
    newest = select(func.max(trials.c.generation)).where(mine).scalar_subquery()
    return set(connection.execute(select(trials.c.number).where(mine, trials.c.generation >= newest - 1)).scalars())


# Checkpoints


def kept(connection: Connection, trial_ids: Sequence[int]) -> dict[int, list[RowMapping]]:
    """Trial id -> its kept checkpoints, the oldest first."""
    return by_trial(connection.execute(_KEPT, {"trials": list(trial_ids)}).mappings())


def kept_of_study(connection: Connection, study_id: int) -> Sequence[RowMapping]:
    """Every kept checkpoint by trial, the oldest first, with the trial's `number` and its state as `trial_state`."""
    query = (
        select(checkpoints, trials.c.number, trials.c.state.label("trial_state"))
        .join(trials, trials.c.id == checkpoints.c.trial_id)
        .where(trials.c.study_id == study_id, checkpoints.c.state == "kept")
        .order_by(trials.c.number, checkpoints.c.step, checkpoints.c.id)
    )
    return connection.execute(query).mappings().all()


def kept_paths(connection: Connection, study_id: int) -> dict[int, list[str]]:
    """Trial id -> the paths of its kept checkpoints, of the trials that have ended."""
    query = (
        select(checkpoints.c.trial_id, checkpoints.c.path)
        .join(trials)
        .where(checkpoints.c.state == "kept", trials.c.state.in_(TERMINAL_STATES), trials.c.study_id == study_id)
    )
    rows = by_trial(connection.execute(query).mappings())
    return {trial_id: [row["path"] for row in own] for trial_id, own in rows.items()}


def needed(connection: Connection, study_id: int, sources: Sequence[str]) -> Iterator[str]:
    """Those of these checkpoints, each as `<trial number>/<path>`, that open trials start from."""
    for start in range(0, len(sources), PAGE):
        where = {"study": study_id, "sources": list(sources[start : start + PAGE])}
        yield from connection.execute(sql.NEEDED, where).scalars()


def drop(connection: Connection, study_id: int, number: int, trial_id: int, paths: Sequence[str]) -> bool:
    """Mark checkpoints of a trial as deleted; False, and nothing is changed, where an open trial starts from one.

    The rows are locked first, so that who is about to need one waits for this.
    """
    connection.execute(sql.LOCK_CHECKPOINTS, {"trial": trial_id, "paths": list(paths)})
    sources = [f"{number}/{path}" for path in paths]
    if connection.execute(sql.NEEDED, {"study": study_id, "sources": sources}).first() is not None:
        return False
    raised = update(trials).where(trials.c.id == trial_id).values(revision=trials.c.revision + 1)
    revision = connection.execute(raised.returning(trials.c.revision)).scalar_one()
    mine = (checkpoints.c.trial_id == trial_id) & checkpoints.c.path.in_(paths)
    connection.execute(update(checkpoints).where(mine).values(state="deleted", revision=revision))
    return True


# Artifacts


def artifacts(connection: Connection, trial_id: int) -> Sequence[Mapping[str, Any]]:
    """The fields of the trial's artifact events, in their order."""
    return _artifacts(connection, events.c.trial_id == trial_id)


def artifacts_of_study(connection: Connection, study_id: int) -> Sequence[Mapping[str, Any]]:
    """The fields of the artifact events of the study that are of no trial, in their order."""
    return _artifacts(connection, (events.c.study_id == study_id) & events.c.trial_id.is_(None))


def _artifacts(connection: Connection, mine: ColumnElement[bool]) -> Sequence[Mapping[str, Any]]:
    query = select(events.c.fields).where(mine, events.c.kind == "artifact").order_by(events.c.id)
    return connection.execute(query).scalars().all()
