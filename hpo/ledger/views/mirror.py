"""Queries for the mirror: a tracker's progress with a study, and the rows of many trials that it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import and_, bindparam, func, not_, or_, select
from sqlalchemy.dialects import postgresql, sqlite

from hpo.ledger.database.tables import asks, attempts, checkpoints, decisions, events, mirrors, reports, trials
from hpo.ledger.read import by_trial, every
from hpo.ledger.removed import is_shown
from hpo.ledger.rows import (
    CheckpointRow,
    Connection,
    DecisionRow,
    EventRow,
    MetricKey,
    TrialRow,
    UnsentTrial,
    UnsentValue,
    ValueRow,
)

LEFT = 2**31 - 1  # the revision of a run that was deleted in the tracker and must stay deleted
STUDY = -1  # the number under which `mirrors` stores the cursor of a study's own run

_cursor = and_(
    mirrors.c.tracker == bindparam("tracker"),
    mirrors.c.study_id == trials.c.study_id,
    mirrors.c.number == trials.c.number,
)
_sent = func.coalesce(mirrors.c.revision, 0)
_with_cursor = trials.outerjoin(mirrors, _cursor)
_begun = or_(trials.c.fence > 0, trials.c.ended_at.is_not(None))  # or ended without an attempt, such as a refused one
_pending = and_(trials.c.study_id == bindparam("study"), _begun, trials.c.revision > _sent, is_shown)

_BEHIND = select(func.coalesce(func.sum(trials.c.revision - _sent), 0)).select_from(_with_cursor).where(_pending)
_STUDY_CURSOR = select(mirrors.c.run_id, mirrors.c.revision).where(
    mirrors.c.tracker == bindparam("tracker"), mirrors.c.study_id == bindparam("study"), mirrors.c.number == STUDY
)
_TOLD = (
    select(trials.c.told, trials.c.state, trials.c["values"], trials.c.ended_at)
    .where(trials.c.study_id == bindparam("study"), trials.c.told.is_not(None))
    .order_by(trials.c.told)
)
_ASKED = (asks.c.params, asks.c.config, asks.c.config_hash, asks.c.seed)
_PENDING = (
    select(trials, *_ASKED, _sent.label("sent"), mirrors.c.run_id)
    .select_from(_with_cursor.join(asks, asks.c.trial_id == trials.c.id))
    .where(_pending, trials.c.number > bindparam("after"))
    .order_by(trials.c.number)
    .limit(bindparam("n"))
)

_earlier = reports.alias()
_VALUES = (
    select(
        reports,
        # The step's epoch is sent once, with the timestamp of the first transaction that closed it.
        not_(
            select(_earlier.c.step)
            .where(
                _earlier.c.trial_id == reports.c.trial_id,
                _earlier.c.step == reports.c.step,
                _earlier.c.fold == reports.c.fold,
                _earlier.c.epoch.is_not(None),
                _earlier.c.revision < reports.c.revision,
            )
            .exists()
        ).label("first"),
    )
    .select_from(reports.join(trials, trials.c.id == reports.c.trial_id).outerjoin(mirrors, _cursor))
    .where(reports.c.trial_id.in_(bindparam("trials", expanding=True)), reports.c.revision > _sent)
    .order_by(reports.c.trial_id, reports.c.step, reports.c.fold, reports.c.key)
)
_NONFINITE = (
    select(reports.c.trial_id, reports.c.key, reports.c.fold)
    .where(
        reports.c.trial_id.in_(bindparam("trials", expanding=True)),
        or_(
            reports.c.value.is_(None),
            reports.c.value > bindparam("largest"),
            reports.c.value < bindparam("smallest"),
        ),
    )
    .distinct()
)
_CHECKPOINTS = (
    select(checkpoints)
    .where(checkpoints.c.trial_id.in_(bindparam("trials", expanding=True)))
    .order_by(checkpoints.c.trial_id, checkpoints.c.step, checkpoints.c.id)
)
_EVENTS = (
    select(events)
    .where(events.c.trial_id.in_(bindparam("trials", expanding=True)), events.c.kind.in_(("artifact", "out_of_memory")))
    .order_by(events.c.trial_id, events.c.id)
)
_SAVED = (
    select(reports)
    .join(
        checkpoints,
        and_(
            checkpoints.c.trial_id == reports.c.trial_id,
            checkpoints.c.step == reports.c.step,
            checkpoints.c.state == "kept",
        ),
    )
    .where(reports.c.trial_id.in_(bindparam("trials", expanding=True)))
    .order_by(reports.c.trial_id, reports.c.step, reports.c.fold, reports.c.key)
    .distinct()
)
_STOPS = (
    select(decisions)
    .where(decisions.c.trial_id.in_(bindparam("trials", expanding=True)), decisions.c.verdict.in_(("stop", "pause")))
    .order_by(decisions.c.trial_id, decisions.c.step)
)
_PREEMPTIONS = (
    select(attempts.c.trial_id, func.count().label("times"))
    .where(attempts.c.trial_id.in_(bindparam("trials", expanding=True)), attempts.c.outcome == "preempted")
    .group_by(attempts.c.trial_id)
)


# Cursors


class Cursor(NamedTuple):
    """The run of a trial or of a study, and the ledger's revision that the tracker has."""

    run_id: str
    revision: int


def study_cursor(connection: Connection, tracker: str, study_id: int) -> Cursor | None:
    """Returns the cursor of the study's own run, if one is recorded."""
    row = connection.execute(_STUDY_CURSOR, {"tracker": tracker, "study": study_id}).first()
    return None if row is None else Cursor(row.run_id, row.revision)


def cursors(connection: Connection, tracker: str, study_id: int) -> dict[int, Cursor]:
    """Returns trial number, or STUDY -> cursor, of every recorded run of the study."""
    of_study = (mirrors.c.tracker == tracker) & (mirrors.c.study_id == study_id)
    rows = connection.execute(select(mirrors).where(of_study))
    return {row.number: Cursor(row.run_id, row.revision) for row in rows}


def move(connection: Connection, tracker: str, study_id: int, to: Sequence[tuple[int, str, int]]) -> None:
    """Records runs and their progress, each as (number, run id, revision)."""
    insert = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(mirrors)
    new = {"run_id": insert.excluded.run_id, "revision": insert.excluded.revision}
    rows = [
        {"tracker": tracker, "study_id": study_id, "number": number, "run_id": run_id, "revision": revision}
        for number, run_id, revision in to
    ]
    connection.execute(insert.on_conflict_do_update(index_elements=list(mirrors.primary_key), set_=new), rows)


def forget(connection: Connection, tracker: str, study_id: int, numbers: Sequence[int] | None = None) -> None:
    """Drops the cursors of the study and of its trials, or only of the trials with these `numbers`."""
    of_mirror = (mirrors.c.tracker == tracker) & (mirrors.c.study_id == study_id)
    if numbers is not None:
        of_mirror &= mirrors.c.number.in_(numbers)
    connection.execute(mirrors.delete().where(of_mirror))


def behind(connection: Connection, tracker: str, study_id: int) -> int:
    """Returns how many of the ledger's transactions on the trials the tracker lacks; the study's own do not count."""
    return int(connection.execute(_BEHIND, {"tracker": tracker, "study": study_id}).scalar_one())


def pending(connection: Connection, tracker: str, study_id: int, after: int, n: int) -> Sequence[UnsentTrial]:
    """Returns the next `n` trials by number, above `after`, whose runs lack something.

    Each has its ask, its `run_id`, None if no run is recorded, and the revision up to which it was `sent`.
    """
    where = {"tracker": tracker, "study": study_id, "after": after, "n": n}
    return every(UnsentTrial, connection.execute(_PENDING, where))


def all_trials(connection: Connection, study_id: int) -> Sequence[TrialRow]:
    """Returns every trial of the study, by number."""
    return every(TrialRow, connection.execute(select(trials).where(trials.c.study_id == study_id)))


# The study


def last_end(connection: Connection, study_id: int) -> float | None:
    """Returns when the last of the study's trials ended, in seconds since the epoch; None if none has."""
    return connection.execute(select(func.max(trials.c.ended_at)).where(trials.c.study_id == study_id)).scalar_one()


def told(connection: Connection, study_id: int) -> list[tuple[int, str, list[float] | None, float]]:
    """Returns (position in the sequence of tells, state, values, end time) of every told trial, in order."""
    return [tuple(row) for row in connection.execute(_TOLD, {"study": study_id})]


# Trials, many in one query: trial id -> rows


def counts(connection: Connection, study_id: int) -> dict[str, int]:
    """Returns state -> the number of trials of the study in it."""
    query = select(trials.c.state, func.count().label("trials")).where(trials.c.study_id == study_id)
    return {row.state: row.trials for row in connection.execute(query.group_by(trials.c.state))}


def first_params(connection: Connection, study_id: int, n: int) -> Sequence[dict[str, Any]]:
    """Returns the parameters of the first `n` trials."""
    query = (
        select(asks.c.params)
        .join(trials)
        .where(trials.c.study_id == study_id, is_shown)
        .order_by(trials.c.number)
        .limit(n)
    )
    return connection.execute(query).scalars().all()


def values(connection: Connection, tracker: str, trial_ids: Sequence[int]) -> dict[int, list[UnsentValue]]:
    """Returns the reported values that the tracker lacks, by step; `first` if no earlier one has closed its epoch."""
    where = {"tracker": tracker, "trials": list(trial_ids)}
    return by_trial(every(UnsentValue, connection.execute(_VALUES, where)))


def last_reports(connection: Connection, trial_ids: Sequence[int]) -> dict[int, float]:
    """Returns when each trial reported last, in seconds since the epoch; omits those without a report."""
    last = select(reports.c.trial_id, func.max(reports.c.at)).group_by(reports.c.trial_id)
    rows = connection.execute(last.where(reports.c.trial_id.in_(list(trial_ids))))
    return {row[0]: row[1] for row in rows}


def last_report(connection: Connection, trial_id: int, revision: int) -> float | None:
    """Returns when a trial had last reported at `revision`; None if it had not."""
    until = (reports.c.trial_id == trial_id) & (reports.c.revision <= revision)
    return connection.execute(select(func.max(reports.c.at)).where(until)).scalar_one()


def reported(connection: Connection, study_id: int) -> list[tuple[str, int]]:
    """Returns (key, fold) of everything that trials of the study have reported."""
    rows = connection.execute(
        select(reports.c.key, reports.c.fold).join(trials).where(trials.c.study_id == study_id).distinct()
    )
    return [(row.key, row.fold) for row in rows]


def unsent(connection: Connection, trial_id: int, revision: int) -> list[tuple[str, int, int]]:
    """Returns (key, step, fold) of the values of a trial that a cursor at `revision` has not passed."""
    newer = (reports.c.trial_id == trial_id) & (reports.c.revision > revision)
    rows = connection.execute(select(reports.c.key, reports.c.step, reports.c.fold).where(newer))
    return [(row.key, row.step, row.fold) for row in rows]


def nonfinite(connection: Connection, trial_ids: Sequence[int], largest: float) -> dict[int, list[MetricKey]]:
    """Returns the metrics, `key` and `fold`, that ever had a NaN, or a value beyond `largest` on either side."""
    where = {"trials": list(trial_ids), "largest": largest, "smallest": -largest}
    return by_trial(every(MetricKey, connection.execute(_NONFINITE, where)))


def saved_values(connection: Connection, trial_ids: Sequence[int]) -> dict[int, list[ValueRow]]:
    """Returns the values that were reported with a checkpoint that is kept."""
    return by_trial(every(ValueRow, connection.execute(_SAVED, {"trials": list(trial_ids)})))


def all_checkpoints(connection: Connection, trial_ids: Sequence[int]) -> dict[int, list[CheckpointRow]]:
    """Returns all checkpoints by step, including dropped or damaged ones."""
    return by_trial(every(CheckpointRow, connection.execute(_CHECKPOINTS, {"trials": list(trial_ids)})))


def shown_events(connection: Connection, trial_ids: Sequence[int]) -> Sequence[EventRow]:
    """Returns the events that a run shows, on artifacts and on exhausted memory, by trial, in their order."""
    return every(EventRow, connection.execute(_EVENTS, {"trials": list(trial_ids)}))


def stops(connection: Connection, trial_ids: Sequence[int]) -> dict[int, list[DecisionRow]]:
    """Returns the decisions to stop or to pause, by step."""
    return by_trial(every(DecisionRow, connection.execute(_STOPS, {"trials": list(trial_ids)})))


def preemptions(connection: Connection, trial_ids: Sequence[int]) -> dict[int, int]:
    """Returns how many attempts were preempted; omits the trials that have none."""
    return {row.trial_id: row.times for row in connection.execute(_PREEMPTIONS, {"trials": list(trial_ids)})}
