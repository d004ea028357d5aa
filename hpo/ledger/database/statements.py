"""Builds the ledger's hot statements once: building one costs SQLAlchemy several times as much as running it.

Parameters are `bindparam`s; their names never equal a column's if the statement also sets that column.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

from sqlalchemy import (
    BindParameter,
    Double,
    String,
    bindparam,
    case,
    cast,
    exists,
    func,
    insert,
    select,
    union,
    union_all,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from hpo.ledger.database.tables import asks, attempts, checkpoints, decisions, leases, reports, studies, trials
from hpo.space.trial_state import OPEN_STATES

_now: BindParameter[float] = bindparam("now")
_at_step: BindParameter[int] = bindparam("at_step")
_at_epoch: BindParameter[int] = bindparam("at_epoch")
_last_step: BindParameter[int] = bindparam("last_step")
_trial = trials.c.id == bindparam("trial")
_held = _trial & (trials.c.fence == bindparam("held")) & (trials.c.state == "running")
_attempt = (
    (attempts.c.trial_id == bindparam("trial")) & (attempts.c.fence == bindparam("held")) & attempts.c.outcome.is_(None)
)


@cache
def _insert_new(dialect: str, table: Any) -> Any:
    module = postgresql if dialect == "postgresql" else sqlite
    return module.insert(table).on_conflict_do_nothing()


def insert_new(connection: Connection, table: object) -> Any:
    """Returns INSERT ... ON CONFLICT DO NOTHING in the connection's dialect."""
    return _insert_new(connection.dialect.name, table)


@cache
def _insert_trial(dialect: str) -> Any:
    return _insert_new(dialect, trials).returning(trials.c.id)


def insert_trial(connection: Connection) -> Any:
    """Returns the statement that inserts a trial unless its number is taken, and returns its id."""
    return _insert_trial(connection.dialect.name)


CHECK_LEASE = (
    update(leases)
    .where(
        leases.c.name == bindparam("lease"), leases.c.owner == bindparam("holder"), leases.c.fence == bindparam("held")
    )
    .values(renewals=leases.c.renewals + 1)
)

TELL = (
    update(trials)
    .where(trials.c.study_id == bindparam("study"), trials.c.number == bindparam("trial"), trials.c.told.is_(None))
    .values(told=bindparam("position"))
)

INSERT_ASK = insert(asks)

# Waiting trials of those studies among the given ones that are open, lowest numbers first.
WAITING = (
    select(trials.c.id)
    .join(studies, studies.c.id == trials.c.study_id)
    .where(
        trials.c.state == "waiting",
        studies.c.state == "open",
        studies.c.id.in_(bindparam("studies", expanding=True)),
    )
    .order_by(trials.c.study_id, trials.c.number)
    .limit(bindparam("n"))
    .with_for_update(of=trials, skip_locked=True)
)

_later = trials.alias("later")

# Waiting trials that precede a running trial of the same study.
OVERDUE = WAITING.where(
    exists().where(
        _later.c.study_id == trials.c.study_id, _later.c.state == "running", _later.c.number > trials.c.number
    )
)

_TAKEN = (trials.c.id, trials.c.study_id, trials.c.number, trials.c.fence, trials.c.step, trials.c.start)

# The trials of a claim whose answer was lost.
CLAIMED = (
    select(*_TAKEN)
    .join(attempts, (attempts.c.trial_id == trials.c.id) & (attempts.c.fence == trials.c.fence))
    .where(
        trials.c.state == "running",
        trials.c.study_id.in_(bindparam("studies", expanding=True)),
        attempts.c.claim == bindparam("token"),
    )
    .order_by(trials.c.study_id, trials.c.number)
)

TAKE = (
    update(trials)
    .where(_trial, trials.c.state == "waiting")
    .values(
        state="running",
        fence=trials.c.fence + 1,
        revision=trials.c.revision + 1,
        group=bindparam("of_group"),
        started_at=case((trials.c.started_at.is_(None), _now), else_=trials.c.started_at),
    )
    .returning(*_TAKEN)
)

KEPT = (
    select(checkpoints, trials.c.number)
    .join(trials, trials.c.id == checkpoints.c.trial_id)
    .where(checkpoints.c.trial_id == bindparam("trial"), checkpoints.c.state == "kept")
    .order_by(checkpoints.c.step.desc(), checkpoints.c.id.desc())
)

# The restart that a trial has obeyed last.
RESTART = (
    select(decisions.c.checkpoint, decisions.c.params, decisions.c.obeyed)
    .where(
        decisions.c.trial_id == bindparam("trial"),
        decisions.c.verdict == "restart_from",
        decisions.c.obeyed.is_not(None),
    )
    .order_by(decisions.c.obeyed.desc())
    .limit(1)
)

# A checkpoint by its trial's number; locked, so that retention waits for a transaction that is about to need it.
SOURCE = (
    select(checkpoints, trials.c.number)
    .join(trials, trials.c.id == checkpoints.c.trial_id)
    .where(
        trials.c.study_id == bindparam("study"),
        trials.c.number == bindparam("trial_number"),
        checkpoints.c.path == bindparam("directory"),
    )
)
LOCKED_SOURCE = SOURCE.with_for_update(of=checkpoints, read=True)

# The newest kept checkpoint of a trial, by the trial's number.
NEWEST = (
    select(checkpoints.c.path, checkpoints.c.step, checkpoints.c.epoch, trials.c.generation)
    .join(trials, trials.c.id == checkpoints.c.trial_id)
    .where(
        trials.c.study_id == bindparam("study"),
        trials.c.number == bindparam("trial"),
        checkpoints.c.state == "kept",
    )
    .order_by(checkpoints.c.step.desc(), checkpoints.c.id.desc())
    .limit(1)
)

# The checkpoints, among some, that open trials start from, by a restart or from the beginning.
_open = (trials.c.study_id == bindparam("study")) & trials.c.state.in_(OPEN_STATES)
_sources: BindParameter[list[str]] = bindparam("sources", expanding=True)
# Each selects from the `sources`, `<trial number>/<path>`: NEEDED those that open trials start from, HELD those that a
# backup holds.
NEEDED = union(
    select(decisions.c.checkpoint)
    .join(trials, trials.c.id == decisions.c.trial_id)
    .where(_open, decisions.c.verdict == "restart_from", decisions.c.checkpoint.in_(_sources)),
    select(trials.c.start).where(_open, trials.c.start.in_(_sources)),
)
_source = cast(trials.c.number, String) + "/" + checkpoints.c.path
_wall: BindParameter[float] = bindparam("wall", callable_=time.time, type_=Double)
HELD = (
    select(_source)
    .join(trials, trials.c.id == checkpoints.c.trial_id)
    .where(trials.c.study_id == bindparam("study"), checkpoints.c.held_until > _wall, _source.in_(_sources))
)
NEEDED_OR_HELD = union(*NEEDED.selects, HELD)

LOCK_CHECKPOINTS = (
    select(checkpoints.c.id)
    .where(checkpoints.c.trial_id == bindparam("trial"), checkpoints.c.path.in_(bindparam("paths", expanding=True)))
    .with_for_update()
)

INSERT_ATTEMPT = insert(attempts)

ASKED = (
    select(asks.c.params, asks.c.config, asks.c.config_hash, studies.c.lease_seconds, trials.c.losses)
    .join(trials, trials.c.id == asks.c.trial_id)
    .join(studies, studies.c.id == trials.c.study_id)
    .where(asks.c.trial_id == bindparam("trial"))
)

RENEW = update(attempts).where(_attempt).values(renewals=attempts.c.renewals + 1)

STEP_ATTEMPT = (
    update(attempts).where(_attempt, attempts.c.step < bindparam("at_step")).values(step=bindparam("at_step"))
)

# Checks the fence and moves the trial on in one statement.
ADVANCE = (
    update(trials)
    .where(_held)
    .values(
        revision=trials.c.revision + 1,
        step=case((trials.c.step < _at_step, _at_step), else_=trials.c.step),
        epoch=case((trials.c.epoch < _at_epoch, _at_epoch), else_=trials.c.epoch),
    )
    .returning(trials.c.revision)
)

BUMP = update(trials).where(_held).values(revision=trials.c.revision + 1).returning(trials.c.revision)

FIRST_VALUES = select(reports.c.key, reports.c.value).where(
    reports.c.trial_id == bindparam("trial"),
    reports.c.step == bindparam("at_step"),
    reports.c.fold == bindparam("fold"),
)

DECISION = select(decisions).where(
    decisions.c.trial_id == bindparam("trial"),
    decisions.c.step == bindparam("at_step"),
    decisions.c.fold == bindparam("fold"),
)

INSERT_DECISION = insert(decisions)

OBEY = (
    update(decisions)
    .where(
        decisions.c.trial_id == bindparam("trial"),
        decisions.c.verdict == bindparam("kind"),
        decisions.c.obeyed.is_(None),
    )
    .values(obeyed=bindparam("held"))
    .returning(decisions.c.step, decisions.c.checkpoint, decisions.c.params)
)

DESCEND = update(trials).where(_trial).values(parent=bindparam("ancestor"), generation=trials.c.generation + 1)

THAW = (
    update(trials)
    .where(
        trials.c.study_id == bindparam("study"),
        trials.c.state == "paused",
        trials.c.number.in_(bindparam("numbers", expanding=True)),
    )
    .values(state="waiting", revision=trials.c.revision + 1)
)

RETIRE = (
    update(trials)
    .where(_trial, trials.c.state == "paused")
    .values(
        state=bindparam("new_state"),
        outcome=bindparam("new_outcome"),
        error=bindparam("new_error"),
        values=bindparam("new_values", type_=trials.c["values"].type),
        violations=bindparam("new_violations", type_=trials.c.violations.type),
        ended_at=bindparam("ended"),
        revision=trials.c.revision + 1,
    )
)

_got_on = exists().where(checkpoints.c.trial_id == trials.c.id, checkpoints.c.fence == trials.c.fence)
FINISH = (
    update(trials)
    .where(_held)
    .values(
        state=bindparam("new_state"),
        outcome=bindparam("new_outcome"),
        values=bindparam("new_values", type_=trials.c["values"].type),
        violations=bindparam("new_violations", type_=trials.c.violations.type),
        error=bindparam("new_error"),
        traceback=bindparam("new_traceback"),
        ended_at=bindparam("ended"),
        losses=case((_got_on, 0), else_=trials.c.losses),
        revision=trials.c.revision + 1,
    )
    .returning(trials.c.revision)
)

END_ATTEMPT = (
    update(attempts)
    .where(_attempt)
    .values(
        outcome=bindparam("ended_as"),
        ended_at=bindparam("ended"),
        step=case((attempts.c.step < _last_step, _last_step), else_=attempts.c.step),
    )
)

# The times at which an attempt began, last reported and last saved; one that did not has no row.
SIGNS_OF_LIFE = union_all(
    select(attempts.c.started_at).where(_attempt),
    *(
        select(func.max(table.c.at))
        .where(table.c.trial_id == bindparam("trial"), table.c.fence == bindparam("held"))
        .having(func.count() > 0)
        for table in (reports, checkpoints)
    ),
)
