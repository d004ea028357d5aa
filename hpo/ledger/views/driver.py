"""Holds the driver's queries and transactions on a study's row and its trials, except asking and telling."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

from sqlalchemy import and_, bindparam, func, select, update
from sqlalchemy.engine import Connection

from hpo.ledger import answer, queries, transactions
from hpo.ledger.database import statements as sql
from hpo.ledger.database.changes import announce
from hpo.ledger.database.tables import asks, attempts, checkpoints, decisions, events, reports, studies, trials, workers
from hpo.ledger.history import PAGE, Curves
from hpo.ledger.leases import Lease
from hpo.ledger.read import every, first
from hpo.ledger.rows import NewestCheckpoint, ProposedTrial, RunningAttempt, StudyRow, TrialRow
from hpo.space.trial_state import OPEN_STATES, TERMINAL_STATES
from trainer.report import Outcome

_FORGIVEN = "failures_forgiven"  # the event of a resume after failures had ended the study

_COUNT_TIME = update(studies).where(studies.c.id == bindparam("study")).values(seconds_used=bindparam("used"))

_ALL = (
    select(trials, asks.c.coordinates, asks.c.params, asks.c.trial_attrs, asks.c.study_attrs)
    .join(asks, asks.c.trial_id == trials.c.id)
    .where(trials.c.study_id == bindparam("study"))
    .order_by(trials.c.number)
)

_ENDS_SINCE = _ALL.where(trials.c.told >= bindparam("told")).order_by(None).order_by(trials.c.told)
_TRIALS_SINCE = _ALL.where(trials.c.number >= bindparam("asked"))

_SOME = _ALL.where(trials.c.number.in_(bindparam("numbers", expanding=True)))

# Number and state of the trials that have paused or ended and are not told.
HALTED = select(trials.c.number, trials.c.state).where(
    trials.c.study_id == bindparam("study"),
    trials.c.number >= bindparam("first"),
    trials.c.state.in_(("paused", *TERMINAL_STATES)),
    trials.c.told.is_(None),
)

_HALTED_AMONG = HALTED.where(trials.c.number.in_(bindparam("going", expanding=True)))

_AT_DECISION = and_(*(reports.c[name] == decisions.c[name] for name in ("trial_id", "step", "fold")))

_PAUSES = (
    select(trials.c.number, func.max(reports.c.epoch).label("epoch"))
    .join(decisions, decisions.c.trial_id == trials.c.id)
    .join(reports, _AT_DECISION)
    .where(
        trials.c.study_id == bindparam("study"),
        trials.c.state.in_(OPEN_STATES),
        decisions.c.verdict == "pause",
        decisions.c.obeyed.is_not(None),
    )
    .group_by(trials.c.number)
)

_EVERY_PAUSE = (
    select(trials.c.number, func.max(reports.c.epoch).label("epoch"))
    .join(decisions, decisions.c.trial_id == trials.c.id)
    .join(reports, _AT_DECISION)
    .where(trials.c.study_id == bindparam("study"), decisions.c.verdict == "pause", decisions.c.obeyed.is_not(None))
    .group_by(trials.c.number, decisions.c.step)
    .order_by(trials.c.number, decisions.c.step)
)

_THAWS = (
    select(trials.c.number, events.c.fields)
    .join(trials, trials.c.id == events.c.trial_id)
    .where(events.c.study_id == bindparam("study"), events.c.kind == transactions.THAWED)
    .order_by(events.c.id)
)

_CONFIGS = (
    select(trials.c.number, asks.c.config)
    .join(asks, asks.c.trial_id == trials.c.id)
    .where(trials.c.study_id == bindparam("study"), trials.c.state.in_(OPEN_STATES))
)

_RUNNING = (
    select(
        trials.c.id,
        trials.c.number,
        trials.c.fence,
        trials.c.revision,
        attempts.c.renewals,
        workers.c.host,
        workers.c.pid,
        workers.c.pid_started,
    )
    .join(attempts, (attempts.c.trial_id == trials.c.id) & (attempts.c.fence == trials.c.fence))
    .join(workers, workers.c.id == attempts.c.worker_id)
    .where(trials.c.state == "running", trials.c.study_id == bindparam("study"))
    .order_by(trials.c.number)
)


# The study's row


def create_study(connection: Connection, row: Mapping[str, object]) -> StudyRow:
    """Inserts a study. Returns its row, or that of a study that has taken the name in the meantime."""
    connection.execute(sql.insert_new(connection, studies), row)
    return StudyRow.of(connection.execute(select(studies).where(studies.c.name == row["name"])).mappings().one())


def change_study(connection: Connection, study_id: int, values: Mapping[str, object]) -> None:
    """Sets columns of the study's row."""
    raised = studies.c.revision + 1
    connection.execute(update(studies).where(studies.c.id == study_id).values(**values, revision=raised))
    answer.changed(connection, study_id)


def count_time(connection: Connection, study_id: int, seconds: float) -> None:
    """Sets the seconds for which the study has been driven, over all its resumptions."""
    connection.execute(_COUNT_TIME, {"study": study_id, "used": seconds})


def any_judged(connection: Connection, study_id: int) -> bool:
    """Returns whether a trial of the study has been judged by its objectives, or may be."""
    judged = (trials.c.study_id == study_id) & trials.c.state.in_(("complete", "pruned", "paused"))
    return connection.execute(select(trials.c.id).where(judged).limit(1)).first() is not None


def any_saved(connection: Connection, study_id: int, number: int | None = None) -> bool:
    """Returns whether a trial of the study, or the trial of this number, has ever saved a checkpoint."""
    saved = select(checkpoints.c.id).join(trials).where(trials.c.study_id == study_id).limit(1)
    saved = saved if number is None else saved.where(trials.c.number == number)
    return connection.execute(saved).first() is not None


# Its trials


def all_rows(connection: Connection, study_id: int) -> Sequence[ProposedTrial]:
    """Returns every trial with its ask, by number."""
    return every(ProposedTrial, connection.execute(_ALL, {"study": study_id}))


def since(
    connection: Connection, study_id: int, asked: int, told: int
) -> tuple[Sequence[ProposedTrial], Sequence[ProposedTrial]]:
    """Returns the trials told after the first `told`, in order of tells, and those asked after the first `asked`."""
    ends = every(ProposedTrial, connection.execute(_ENDS_SINCE, {"study": study_id, "told": told}))
    return ends, every(ProposedTrial, connection.execute(_TRIALS_SINCE, {"study": study_id, "asked": asked}))


def open_configs(connection: Connection, study_id: int) -> dict[int, Mapping[str, Any]]:
    """Returns number -> whole configuration of each open trial."""
    return {row.number: row.config for row in connection.execute(_CONFIGS, {"study": study_id})}


def pauses(connection: Connection, study_id: int) -> dict[int, int | None]:
    """Returns number -> epoch of the last pause, for each open trial that has paused; None before a full epoch."""
    return {row.number: row.epoch for row in connection.execute(_PAUSES, {"study": study_id})}


def every_pause(connection: Connection, study_id: int) -> dict[int, list[int]]:
    """Returns number -> epochs of the pauses, ascending, for each trial that has paused."""
    epochs = dict[int, list[int]]()
    for number, epoch in connection.execute(_EVERY_PAUSE, {"study": study_id}):
        epochs.setdefault(number, []).append(epoch)
    return epochs


def thaws(connection: Connection, study_id: int) -> list[tuple[int, int]]:
    """Returns the trials that continued as steps of the study, in order, each with the number of trials asked
    before."""
    return [(row.number, row.fields["asked"]) for row in connection.execute(_THAWS, {"study": study_id})]


def running(connection: Connection, study_id: int) -> Sequence[RunningAttempt]:
    """Returns the running attempts, sorted by the number of their trial."""
    return every(RunningAttempt, connection.execute(_RUNNING, {"study": study_id}))


def newest_checkpoint(connection: Connection, study_id: int, number: int) -> NewestCheckpoint | None:
    """Returns `path`, `step` and `epoch` of a trial's newest kept checkpoint, and the trial's `generation`."""
    return first(NewestCheckpoint, connection.execute(sql.NEWEST, {"study": study_id, "trial": number}))


def halted(
    connection: Connection, study_id: int, first: int, paused: Set[int], ended: Collection[int], going: Set[int] | None
) -> tuple[set[int], list[ProposedTrial]]:
    """Returns the paused trials from `first` on, and the rows of the trials that halted after `paused` and `ended`.

    going  the trials that can have halted, so that those that wait at a rung are not read each time; None for any
    """
    where: dict[str, Any] = {"study": study_id, "first": first}
    among = going is not None and len(going) <= PAGE
    if among:
        states = connection.execute(_HALTED_AMONG, where | {"going": list(going or ())}).all()
    else:
        states = connection.execute(HALTED, where).all()
    waiting = {number for number, state in states if state == "paused"} | (paused if among else set[int]())
    known = waiting & paused
    new = [number for number, _ in states if number not in known and number not in ended]
    return waiting, rows(connection, study_id, new)


def rows(connection: Connection, study_id: int, numbers: Sequence[int]) -> list[ProposedTrial]:
    """Returns the trials of these numbers, each with its ask."""
    pages = (numbers[start : start + PAGE] for start in range(0, len(numbers), PAGE))
    where = ({"study": study_id, "numbers": list(page)} for page in pages)
    return [row for page in where for row in every(ProposedTrial, connection.execute(_SOME, page))]


def without_value(connection: Connection, study_id: int) -> bool:
    """Returns whether no trial has ended with a value and no open trial has trained an epoch."""
    rows = every(TrialRow, connection.execute(select(trials).where(trials.c.study_id == study_id)))
    valued = any(value is not None for row in rows for value in row.values or ())  # pyright: ignore
    return not valued and not any(row.state in OPEN_STATES and row.epoch > row.from_epoch for row in rows)


def thaw(connection: Connection, study_id: int, numbers: Sequence[int]) -> None:
    """Lets paused trials wait for a worker again; other trials stay as they are."""
    connection.execute(sql.THAW, {"study": study_id, "numbers": list(numbers)})
    if numbers:
        announce(connection)


def retire(connection: Connection, study_id: int, numbers: Sequence[int], curves: Curves) -> None:
    """Ends paused trials as stopped, with the values of the rung they wait at; other trials stay as they are."""
    for row in rows(connection, study_id, numbers):
        judged = curves.judge(connection, row.id, Outcome("pruned", row.step, row.epoch))
        outcome = judged.outcome
        changes = {"new_state": transactions.STATE_OF_OUTCOME[outcome.kind], "new_outcome": outcome.kind}
        changes |= {
            "new_values": judged.values,
            "new_violations": judged.violations,
            "new_error": outcome.error or None,
        }
        connection.execute(sql.RETIRE, changes | {"trial": row.id, "ended": time.time()})


def outcomes(connection: Connection, study_id: int) -> set[str]:
    """Returns the outcomes that the trials of a study have had."""
    query = select(trials.c.outcome).where(trials.c.study_id == study_id)
    return set(connection.execute(query.distinct()).scalars())


def complete(connection: Connection, study_id: int) -> bool:
    """Returns whether a trial of the study is complete."""
    completed = (trials.c.study_id == study_id) & (trials.c.state == "complete")
    return connection.execute(select(trials.c.id).where(completed).limit(1)).first() is not None


def any_waits(connection: Connection, study_id: int) -> bool:
    """Returns whether a trial waits at a rung with a value."""
    query = select(trials.c["values"]).where(trials.c.study_id == study_id, trials.c.state == "paused")
    return any(value is not None for value in connection.execute(query).scalars())


def failed(connection: Connection, study_id: int) -> list[int]:
    """Returns the numbers of the failed trials, ascending."""
    failures = (trials.c.study_id == study_id) & (trials.c.state == "failed")
    return list(connection.execute(select(trials.c.number).where(failures).order_by(trials.c.number)).scalars())


def end(connection: Connection, lease: Lease, study_id: int, state: str, asked: int, why: str) -> None:
    """Writes the state that the driver with `lease` leaves the study in.

    why  the reason why nothing is left to try after `asked` trials; empty if that is not so
    """
    lease.check(connection)
    values = {"state": state, "revision": studies.c.revision + 1}
    left = update(studies).where(studies.c.id == study_id, studies.c.state != state).values(**values)
    if connection.execute(left).rowcount:
        answer.changed(connection, study_id)
        announce(connection)
    if why and not nothing_left(connection, study_id, asked):
        fields = {"trials": asked, "why": why}
        transactions.note(connection, study_id, "nothing_left", fields, _nothing_left(study_id, asked))


def forgive(connection: Connection, lease: Lease, study_id: int, first: int) -> None:
    """Records that in a resumed study only failures of trials from `first` on count."""
    transactions.note(connection, study_id, _FORGIVEN, {"first": first}, f"{lease.name}.{lease.fence}.forgiven")


def forgiven(connection: Connection, study_id: int) -> int:
    """Returns the first trial whose failure counts; the user has resumed the study after earlier failures."""
    fields = queries.newest_event(connection, study_id, _FORGIVEN)
    return fields["first"] if fields else 0


def nothing_left(connection: Connection, study_id: int, asked: int) -> bool:
    """Returns whether the study has ended after `asked` trials because nothing was left to try."""
    noted = events.c.uid == _nothing_left(study_id, asked)
    return connection.execute(select(events.c.id).where(noted)).first() is not None


def _nothing_left(study_id: int, asked: int) -> str:
    return f"study:{study_id}.{asked}.nothing_left"
