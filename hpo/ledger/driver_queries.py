"""The driver's own queries and transactions, besides asking and telling: of the study's row, and of its trials."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

from sqlalchemy import and_, bindparam, func, select, update
from sqlalchemy.engine import Connection, RowMapping

from hpo.ledger import statements as sql
from hpo.ledger import transactions
from hpo.ledger.history import PAGE, Curves
from hpo.ledger.leases import Lease
from hpo.ledger.tables import asks, attempts, checkpoints, decisions, events, reports, studies, trials, workers
from hpo.space.trial_state import OPEN_STATES, TERMINAL_STATES
from trainer.report import Outcome

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

# Number and state of the trials that nobody trains or is to train, but for those told.
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

_CONFIGS = (
    select(trials.c.number, asks.c.config)
    .join(asks, asks.c.trial_id == trials.c.id)
    .where(trials.c.study_id == bindparam("study"), trials.c.state.in_(OPEN_STATES))
)

_RUNNING = (
    select(
        trials.c.id,
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
)


# The study's row


def create_study(connection: Connection, row: Mapping[str, Any]) -> RowMapping:
    """The new study's row, or that of the one which has the name by now."""
    connection.execute(sql.insert_new(connection, studies), row)
    return connection.execute(select(studies).where(studies.c.name == row["name"])).mappings().one()


def change_study(connection: Connection, study_id: int, values: Mapping[str, Any]) -> None:
    """Set columns of the study's row."""
    raised = studies.c.revision + 1
    connection.execute(update(studies).where(studies.c.id == study_id).values(**values, revision=raised))


def count_time(connection: Connection, study_id: int, seconds: float) -> None:
    """Set for how many seconds the study has been driven, over all its resumptions."""
    connection.execute(_COUNT_TIME, {"study": study_id, "used": seconds})


def any_judged(connection: Connection, study_id: int) -> bool:
    """Whether a trial of the study has been judged by its objectives, or may be."""
    mine = (trials.c.study_id == study_id) & trials.c.state.in_(("complete", "pruned", "paused"))
    return connection.execute(select(trials.c.id).where(mine).limit(1)).first() is not None


def any_saved(connection: Connection, study_id: int, number: int | None = None) -> bool:
    """Whether a trial of the study, or the one of that number, has ever saved a checkpoint."""
    saved = select(checkpoints.c.id).join(trials).where(trials.c.study_id == study_id).limit(1)
    saved = saved if number is None else saved.where(trials.c.number == number)
    return connection.execute(saved).first() is not None


# Its trials


def all_rows(connection: Connection, study_id: int) -> Sequence[RowMapping]:
    """Every trial by number, with what was asked."""
    return connection.execute(_ALL, {"study": study_id}).mappings().all()


def since(
    connection: Connection, study_id: int, asked: int, told: int
) -> tuple[Sequence[RowMapping], Sequence[RowMapping]]:
    """The ends since so many were told, in the order of tells, and the trials since so many were asked for."""
    ends = connection.execute(_ENDS_SINCE, {"study": study_id, "told": told}).mappings().all()
    return ends, connection.execute(_TRIALS_SINCE, {"study": study_id, "asked": asked}).mappings().all()


def open_configs(connection: Connection, study_id: int) -> dict[int, Mapping[str, Any]]:
    """Number -> the whole configuration of each open trial."""
    return {row.number: row.config for row in connection.execute(_CONFIGS, {"study": study_id})}


def pauses(connection: Connection, study_id: int) -> dict[int, int | None]:
    """Number of each open trial that has paused -> the epoch at which it did last, None where none was closed."""
    return {row.number: row.epoch for row in connection.execute(_PAUSES, {"study": study_id})}


def running(connection: Connection, study_id: int) -> Sequence[RowMapping]:
    """The trials that are trained: `id`, `fence` and `revision`, the attempt's `renewals`, and the worker's process."""
    return connection.execute(_RUNNING, {"study": study_id}).mappings().all()


def newest_checkpoint(connection: Connection, study_id: int, number: int) -> RowMapping | None:
    """Of the newest checkpoint that a trial has kept `path`, `step` and `epoch`, and the trial's `generation`."""
    return connection.execute(sql.NEWEST, {"study": study_id, "trial": number}).mappings().first()


def halted(
    connection: Connection, study_id: int, first: int, paused: Set[int], ended: Collection[int], going: Set[int] | None
) -> tuple[set[int], list[RowMapping]]:
    """The trials from `first` on that are paused, and the rows of those that halted since `paused` and `ended`.

    `going`, if given, are those that alone can have halted: what waits at its rung is then not read again and again.
    """
    where: dict[str, Any] = {"study": study_id, "first": first}
    among = going is not None and len(going) <= PAGE
    if among:
        found = connection.execute(_HALTED_AMONG, where | {"going": list(going or ())}).all()
    else:
        found = connection.execute(HALTED, where).all()
    waiting = {number for number, state in found if state == "paused"} | (paused if among else set[int]())
    known = waiting & paused
    new = [number for number, _ in found if number not in known and number not in ended]
    return waiting, rows(connection, study_id, new)


def rows(connection: Connection, study_id: int, numbers: Sequence[int]) -> list[RowMapping]:
    """The trials of these numbers, each with what was asked."""
    pages = (numbers[start : start + PAGE] for start in range(0, len(numbers), PAGE))
    where = ({"study": study_id, "numbers": list(page)} for page in pages)
    return [row for one in where for row in connection.execute(_SOME, one).mappings()]


def without_value(connection: Connection, study_id: int) -> bool:
    """Whether no trial has ended with a value, and none that is to go on has trained an epoch."""
    rows = connection.execute(select(trials).where(trials.c.study_id == study_id)).mappings().all()
    valued = any(value is not None for row in rows for value in row["values"] or ())
    return not valued and not any(row["state"] in OPEN_STATES and row["epoch"] > row["from_epoch"] for row in rows)


def thaw(connection: Connection, study_id: int, numbers: Sequence[int]) -> None:
    """Let paused trials wait for a worker again; what is not paused stays as it is."""
    connection.execute(sql.THAW, {"study": study_id, "numbers": list(numbers)})


def retire(connection: Connection, study_id: int, numbers: Sequence[int], curves: Curves) -> None:
    """End paused trials as stopped, by the value of the rung they wait at; what is not paused stays as it is."""
    for row in rows(connection, study_id, numbers):
        judged = curves.judge(connection, row["id"], Outcome("pruned", row["step"], row["epoch"]))
        outcome = judged.outcome
        ended = {"new_state": transactions.STATE_OF_OUTCOME[outcome.kind], "new_outcome": outcome.kind}
        ended |= {"new_values": judged.values, "new_violations": judged.violations, "new_error": outcome.error or None}
        connection.execute(sql.RETIRE, ended | {"trial": row["id"], "ended": time.time()})


def outcomes(connection: Connection, study_id: int) -> set[str]:
    """What the trials of a study have come to."""
    mine = select(trials.c.outcome).where(trials.c.study_id == study_id)
    return set(connection.execute(mine.distinct()).scalars())


def complete(connection: Connection, study_id: int) -> bool:
    """Whether a trial is complete."""
    mine = (trials.c.study_id == study_id) & (trials.c.state == "complete")
    return connection.execute(select(trials.c.id).where(mine).limit(1)).first() is not None


def failed(connection: Connection, study_id: int) -> list[int]:
    """The trials that have failed, by number."""
    mine = (trials.c.study_id == study_id) & (trials.c.state == "failed")
    return list(connection.execute(select(trials.c.number).where(mine).order_by(trials.c.number)).scalars())


def end(connection: Connection, lease: Lease, study_id: int, state: str, asked: int, why: str) -> None:
    """Write the state that a study is left in by the driver that holds `lease` and, if after so many trials nothing was
    left to be tried, `why`."""
    lease.check(connection)
    values = {"state": state, "revision": studies.c.revision + 1}
    connection.execute(update(studies).where(studies.c.id == study_id, studies.c.state != state).values(**values))
    if why and not nothing_left(connection, study_id, asked):
        fields = {"trials": asked, "why": why}
        transactions.note(connection, study_id, "nothing_left", fields, _nothing_left(study_id, asked))


def nothing_left(connection: Connection, study_id: int, asked: int) -> bool:
    """Whether the study has ended after so many trials since nothing was left to be tried."""
    noted = events.c.uid == _nothing_left(study_id, asked)
    return connection.execute(select(events.c.id).where(noted)).first() is not None


def _nothing_left(study_id: int, asked: int) -> str:
    return f"study:{study_id}.{asked}.nothing_left"


def trained(row: RowMapping) -> int:
    """The epochs of a trial that has ended, as a budget counts them: none of one that was lost."""
    return 0 if row["outcome"] == "lost" else row["epoch"] - row["from_epoch"]
