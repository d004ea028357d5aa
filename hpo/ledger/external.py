"""Holds the transactions of trials that an external scheduler, such as Ray Tune, controls: for `Ledger.transact`.

A trial of the scheduler is a chain of trials here. Its first trial begins when the scheduler starts it; a child begins
whenever the scheduler continues from another trial's checkpoint. So every value keeps its step, whatever the step of
that checkpoint, and `parent` and `generation` record the lineage. `key` is the scheduler's name for the trial; it is
stored with the ask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.engine import Connection, Row

from hpo.ledger import claims, transactions
from hpo.ledger.claims import Claim
from hpo.ledger.database import statements as sql
from hpo.ledger.database.tables import asks, attempts, decisions, reports, studies, trials
from hpo.ledger.history import Curves, Judgement
from hpo.ledger.rows import ProposedTrial
from hpo.ledger.views import driver as driver_queries
from hpo.space.trial_state import OPEN_STATES, TERMINAL_STATES
from trainer.report import Outcome

KEY, _FROM = "external", "external_from"  # of asks.trial_attrs; the latter is a checkpoint's sha256


@dataclass(frozen=True)
class Start:
    """A trial that the scheduler starts or restarts.

    key     the scheduler's name of it
    origin  the trial number and the sha256 of the checkpoint that it continues from; None for none
    alias   the key of a trial that was proposed before the scheduler had named it
    """

    key: str
    params: Mapping[str, Any]
    origin: tuple[int, str] | None = None
    alias: str = ""


def newest(connection: Connection, study_id: int, key: str) -> ProposedTrial | None:
    """Returns the last trial of the chain with its ask; None if the chain has none."""
    chain = (trials.c.study_id == study_id) & (asks.c.trial_attrs[KEY].as_string() == key)
    query = select(func.max(trials.c.number)).join(asks, asks.c.trial_id == trials.c.id).where(chain)
    number = connection.execute(query).scalar()
    return None if number is None else driver_queries.rows(connection, study_id, [number])[0]


def newest_attempt(connection: Connection, study_id: int, key: str) -> Row[int, int, str | None] | None:
    """Returns the last attempt at the last trial of the chain: `trial_id`, `fence` and `outcome`."""
    if (last := newest(connection, study_id, key)) is None:
        return None
    query = select(attempts.c.trial_id, attempts.c.fence, attempts.c.outcome).where(attempts.c.trial_id == last.id)
    return connection.execute(query.order_by(attempts.c.fence.desc()).limit(1)).first()


def rename(connection: Connection, study_id: int, number: int, key: str) -> None:
    """Renames a trial, for a scheduler that continues an earlier one's work under another key."""
    row = driver_queries.rows(connection, study_id, [number])[0]
    attributes = {**row.trial_attrs, KEY: key}
    connection.execute(update(asks).where(asks.c.trial_id == row.id).values(trial_attrs=attributes))


def insert(connection: Connection, study_id: int, make: Callable[[int], transactions.Ask], key: str) -> int | None:
    """Inserts a new trial of the chain under the next free number.

    Returns that number, or None if `make` has made the trial for another number.
    """
    connection.execute(select(studies.c.id).where(studies.c.id == study_id).with_for_update())
    number = connection.execute(select(func.count()).where(trials.c.study_id == study_id)).scalar_one()
    ask = make(number)
    if ask.number != number:
        return None
    transactions.ask(connection, study_id, [replace(ask, trial_attrs={**ask.trial_attrs, KEY: key})])
    return number


def begin(
    connection: Connection,
    study_id: int,
    start: Start,
    make: Callable[[int], transactions.Ask],
    worker: tuple[str, str],
    curves: Curves,
    who: str,
) -> Claim | None:
    """Returns the trial to train now, claimed by `worker` (id, token): the chain's last trial or a new one.

    Returns None if the last one has ended and nothing has changed since, or if the configuration is invalid.
    """
    if (again := claims.taken(connection, worker[1], study_id)) is not None:
        return again
    last = newest(connection, study_id, start.key)
    if last is None and (last := newest(connection, study_id, start.alias)) is not None:
        rename(connection, study_id, last.number, start.key)
    if last is not None and _goes_on(last, start):
        return _take(connection, study_id, last.number, worker)
    parent, sha256 = start.origin or (None, "")
    number = insert(connection, study_id, lambda number: _from(make(number), sha256), start.key)
    assert number is not None, "made for the number that it was given"
    if last is not None:
        reason = f"it goes on as trial {number}, from a checkpoint of trial {parent}"
        decide(connection, study_id, last.number, "stop", who, reason, curves)
    if parent is not None:
        _descend(connection, study_id, number, parent)
    claim = _take(connection, study_id, number, worker)
    if parent is not None and claim is not None:
        fields = {"parent": parent, "params": claim.params, "instead_of": None if last is None else last.number}
        transactions.record(connection, claim, "restarted", fields, f"{claim.trial_id}.descends")
    return claim


def _goes_on(last: ProposedTrial, start: Start) -> bool:
    """Returns whether the start continues the last trial.

    It must have the same parameters, and a checkpoint of that trial or the one from which the trial began.
    """
    origin = start.origin
    same_origin = origin is None or origin[0] == last.number or origin[1] == last.trial_attrs.get(_FROM)
    return same_origin and last.params == start.params


def _from(ask: transactions.Ask, sha256: str) -> transactions.Ask:
    return replace(ask, trial_attrs={**ask.trial_attrs, _FROM: sha256})


def _take(connection: Connection, study_id: int, number: int, worker: tuple[str, str]) -> Claim | None:
    """Claims a trial for this worker, from whichever worker had it, since the scheduler decides who trains it.

    Returns None if the trial has ended, or ends now because it was lost too often.
    """
    row = driver_queries.rows(connection, study_id, [number])[0]
    if row.state == "running":
        transactions.lose(connection, row.id, row.fence, "it was started again elsewhere")
        row = driver_queries.rows(connection, study_id, [number])[0]
    if row.state in TERMINAL_STATES:
        return None
    driver_queries.thaw(connection, study_id, [number])
    return claims.take(connection, *worker, row.id)


def _descend(connection: Connection, study_id: int, child: int, parent: int) -> None:
    of_study = trials.c.study_id == study_id
    above = select(trials.c.generation).where(of_study, trials.c.number == parent)
    generation = connection.execute(above).scalar_one() + 1
    lineage = update(trials).where(of_study, trials.c.number == child).values(parent=parent, generation=generation)
    connection.execute(lineage)


def decide(
    connection: Connection, study_id: int, number: int, verdict: str, who: str, reason: str, curves: Curves
) -> None:
    """Carries out a verdict on an open trial: `stop` ends it with the values of its curve so far, `pause` lets it wait.

    The decision is stored with the last report. A worker that still has the trial is fenced. A trial that is stopped
    before its first report ends as infeasible, since it has no values.
    """
    row = driver_queries.rows(connection, study_id, [number])[0]
    if row.state in TERMINAL_STATES or (verdict == "pause" and row.state != "running"):
        return
    step = connection.execute(select(func.max(reports.c.step)).where(reports.c.trial_id == row.id)).scalar()
    if step is None:
        if verdict == "stop":
            _end(connection, row, Judgement(Outcome("infeasible", error=f"{reason}, before it had reported anything")))
        return
    _store(connection, row, step, verdict, who, reason)
    if verdict == "pause":
        _end(connection, row, Judgement(Outcome("paused", step, row.epoch)))
        return
    _end(connection, row, curves.judge(connection, row.id, Outcome("pruned", step, row.epoch)))


def lost(connection: Connection, study_id: int, number: int, why: str) -> None:
    """Ends an open trial whose worker will not return."""
    row = driver_queries.rows(connection, study_id, [number])[0]
    _end(connection, row, Judgement(Outcome("lost", row.step, row.epoch, error=why)))


def _store(connection: Connection, row: ProposedTrial, step: int, verdict: str, who: str, reason: str) -> None:
    """Stores a decision as obeyed; a decision that ends a paused trial replaces the pause."""
    values = {"trial_id": row.id, "step": step, "fold": 0, "verdict": verdict, "reason": f"external: {reason}"}
    values |= {"params": {}, "strategy": who, "fence": row.fence, "obeyed": row.fence}
    values |= {"revision": row.revision + 1}
    same_step = (decisions.c.trial_id == row.id) & (decisions.c.step == step) & (decisions.c.fold == 0)
    if not connection.execute(update(decisions).where(same_step).values(**values)).rowcount:
        connection.execute(sql.INSERT_DECISION, values)


def _end(connection: Connection, row: ProposedTrial, judged: Judgement) -> None:
    """Ends or pauses the trial, and ends its running attempt."""
    outcome = judged.outcome
    state = "failed" if outcome.kind == "lost" else transactions.STATE_OF_OUTCOME[outcome.kind]
    now = time.time()
    new = {"state": state, "outcome": outcome.kind, "error": outcome.error or None}
    new |= {"values": judged.values, "violations": judged.violations}
    new |= {"ended_at": None if state in OPEN_STATES else now, "revision": trials.c.revision + 1}
    unchanged = (trials.c.id == row.id) & (trials.c.fence == row.fence) & trials.c.state.in_(OPEN_STATES)
    if connection.execute(update(trials).where(unchanged).values(**new)).rowcount and row.state == "running":
        end = {"trial": row.id, "held": row.fence, "ended_as": outcome.kind, "ended": now}
        connection.execute(sql.END_ATTEMPT, end | {"last_step": outcome.step})


def tell(connection: Connection, study_id: int) -> list[ProposedTrial]:
    """Appends ended trials that were not told yet to the sequence of tells. Returns these trials."""
    of_study = trials.c.study_id == study_id
    num_told = connection.execute(select(func.count()).where(of_study, trials.c.told.is_not(None))).scalar_one()
    query = select(trials.c.number).where(of_study, trials.c.told.is_(None), trials.c.state.in_(TERMINAL_STATES))
    numbers = list(connection.execute(query.order_by(trials.c.number)).scalars())
    for position, number in enumerate(numbers, num_told):
        connection.execute(sql.TELL, {"study": study_id, "trial": number, "position": position})
    return driver_queries.rows(connection, study_id, numbers)
