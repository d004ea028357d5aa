"""The transactions of trials that something else, such as Ray Tune, decides about. Bodies for `Ledger.transact`.

What the other calls a trial is a chain of trials here: one begins when it starts, and another, a child, whenever it
goes on with what a third has learned. So every value keeps the one place it has, wherever the third one stood, and
`parent` and `generation` tell the lineage. `key` is the other's name of the trial, kept with what was asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.engine import Connection, Row, RowMapping

from hpo.ledger import claims, driver_queries, transactions
from hpo.ledger import statements as sql
from hpo.ledger.claims import Claim
from hpo.ledger.history import Curves, Judgement
from hpo.ledger.tables import asks, attempts, decisions, reports, studies, trials
from hpo.space.trial_state import OPEN_STATES, TERMINAL_STATES
from trainer.report import Outcome

KEY, _FROM = "external", "external_from"  # of asks.trial_attrs; the latter is a checkpoint's sha256


@dataclass(frozen=True)
class Start:
    """What the other starts, or starts again: its key, its parameters, and of the checkpoint it goes on from, if any,
    the trial and the sha256. `alias` is the key of a trial that was proposed before the other had a name for it."""

    key: str
    params: Mapping[str, Any]
    origin: tuple[int, str] | None = None
    alias: str = ""


def newest(connection: Connection, study_id: int, key: str) -> RowMapping | None:
    """The last trial of the chain, with what was asked."""
    chain = (trials.c.study_id == study_id) & (asks.c.trial_attrs[KEY].as_string() == key)
    query = select(func.max(trials.c.number)).join(asks, asks.c.trial_id == trials.c.id).where(chain)
    number = connection.execute(query).scalar()
    return None if number is None else driver_queries.rows(connection, study_id, [number])[0]


def newest_attempt(connection: Connection, study_id: int, key: str) -> Row[int, int, str | None] | None:
    """The last attempt at the last trial of the chain: `trial_id`, `fence` and `outcome`."""
    if (last := newest(connection, study_id, key)) is None:
        return None
    mine = select(attempts.c.trial_id, attempts.c.fence, attempts.c.outcome).where(attempts.c.trial_id == last["id"])
    return connection.execute(mine.order_by(attempts.c.fence.desc()).limit(1)).first()


def rename(connection: Connection, study_id: int, number: int, key: str) -> None:
    """Another begins, where one left off, and calls the trial by another name."""
    row = driver_queries.rows(connection, study_id, [number])[0]
    attributes = {**row["trial_attrs"], KEY: key}
    connection.execute(update(asks).where(asks.c.trial_id == row["id"]).values(trial_attrs=attributes))


def insert(connection: Connection, study_id: int, make: Callable[[int], transactions.Ask], key: str) -> int | None:
    """A new trial of the chain, made for the next number there is; that number, None if it was made for another."""
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
    """The trial that is to be trained now, claimed by `worker` (id, token): the chain's last, or a new one.

    None where the last one has ended, and nothing has changed since, or where no such configuration can be.
    """
    if (again := claims.taken(connection, worker[1], study_id)) is not None:
        return again
    last = newest(connection, study_id, start.key)
    if last is None and (last := newest(connection, study_id, start.alias)) is not None:
        rename(connection, study_id, last["number"], start.key)
    if last is not None and _goes_on(last, start):
        return _take(connection, study_id, last["number"], worker)
    parent, sha256 = start.origin or (None, "")
    number = insert(connection, study_id, lambda number: _from(make(number), sha256), start.key)
    assert number is not None, "made for the number that it was given"
    if last is not None:
        reason = f"it goes on as trial {number}, from a checkpoint of trial {parent}"
        decide(connection, study_id, last["number"], "stop", who, reason, curves)
    if parent is not None:
        _descend(connection, study_id, number, parent)
    claim = _take(connection, study_id, number, worker)
    if parent is not None and claim is not None:
        fields = {"parent": parent, "params": claim.params, "instead_of": None if last is None else last["number"]}
        transactions.record(connection, claim, "restarted", fields, f"{claim.trial_id}.descends")
    return claim


def _goes_on(last: RowMapping, start: Start) -> bool:
    """Whether it is the same trial still: the same parameters, and a checkpoint of its own or the one it began with."""
    own = start.origin is None or start.origin[0] == last["number"] or start.origin[1] == last["trial_attrs"].get(_FROM)
    return own and last["params"] == start.params


def _from(ask: transactions.Ask, sha256: str) -> transactions.Ask:
    return replace(ask, trial_attrs={**ask.trial_attrs, _FROM: sha256})


def _take(connection: Connection, study_id: int, number: int, worker: tuple[str, str]) -> Claim | None:
    """The trial as this worker's, whoever had it before: the other says who trains it. None where it has ended, or
    does so since it was lost once too often."""
    row = driver_queries.rows(connection, study_id, [number])[0]
    if row["state"] == "running":
        transactions.lose(connection, row["id"], row["fence"], "it was started again elsewhere")
        row = driver_queries.rows(connection, study_id, [number])[0]
    if row["state"] in TERMINAL_STATES:
        return None
    driver_queries.thaw(connection, study_id, [number])
    return claims.take(connection, *worker, row["id"])


def _descend(connection: Connection, study_id: int, child: int, parent: int) -> None:
    mine = trials.c.study_id == study_id
    above = select(trials.c.generation).where(mine, trials.c.number == parent)
    generation = connection.execute(above).scalar_one() + 1
    lineage = update(trials).where(mine, trials.c.number == child).values(parent=parent, generation=generation)
    connection.execute(lineage)


def decide(
    connection: Connection, study_id: int, number: int, verdict: str, who: str, reason: str, curves: Curves
) -> None:
    """Carry out what was decided of an open trial: `stop` ends it by its curve so far, `pause` lets it wait.

    The decision is stored with the last report. A worker that still has the trial is fenced. One that has reported
    nothing is ended as infeasible: there is nothing to judge it by.
    """
    row = driver_queries.rows(connection, study_id, [number])[0]
    if row["state"] in TERMINAL_STATES or (verdict == "pause" and row["state"] != "running"):
        return
    step = connection.execute(select(func.max(reports.c.step)).where(reports.c.trial_id == row["id"])).scalar()
    if step is None:
        if verdict == "stop":
            _end(connection, row, Judgement(Outcome("infeasible", error=f"{reason}, before it had reported anything")))
        return
    _store(connection, row, step, verdict, who, reason)
    if verdict == "pause":
        _end(connection, row, Judgement(Outcome("paused", step, row["epoch"])))
        return
    _end(connection, row, curves.judge(connection, row["id"], Outcome("pruned", step, row["epoch"])))


def lost(connection: Connection, study_id: int, number: int, why: str) -> None:
    """End an open trial whose worker is gone for good."""
    row = driver_queries.rows(connection, study_id, [number])[0]
    _end(connection, row, Judgement(Outcome("lost", row["step"], row["epoch"], error=why)))


def _store(connection: Connection, row: RowMapping, step: int, verdict: str, who: str, reason: str) -> None:
    """The decision, obeyed as it is taken; one that ends a paused trial takes the place of the pause."""
    values = {"trial_id": row["id"], "step": step, "fold": 0, "verdict": verdict, "reason": f"external: {reason}"}
    values |= {"params": {}, "strategy": who, "fence": row["fence"], "obeyed": row["fence"]}
    values |= {"revision": row["revision"] + 1}
    at = (decisions.c.trial_id == row["id"]) & (decisions.c.step == step) & (decisions.c.fold == 0)
    if not connection.execute(update(decisions).where(at).values(**values)).rowcount:
        connection.execute(sql.INSERT_DECISION, values)


def _end(connection: Connection, row: RowMapping, judged: Judgement) -> None:
    """End the trial, or let it pause, and with it the attempt that runs."""
    outcome = judged.outcome
    state = "failed" if outcome.kind == "lost" else transactions.STATE_OF_OUTCOME[outcome.kind]
    now = time.time()
    new = {"state": state, "outcome": outcome.kind, "error": outcome.error or None}
    new |= {"values": judged.values, "violations": judged.violations}
    new |= {"ended_at": None if state in OPEN_STATES else now, "revision": trials.c.revision + 1}
    held = (trials.c.id == row["id"]) & (trials.c.fence == row["fence"]) & trials.c.state.in_(OPEN_STATES)
    if connection.execute(update(trials).where(held).values(**new)).rowcount and row["state"] == "running":
        ended = {"trial": row["id"], "held": row["fence"], "ended_as": outcome.kind, "ended": now}
        connection.execute(sql.END_ATTEMPT, ended | {"last_step": outcome.step})


def tell(connection: Connection, study_id: int) -> list[RowMapping]:
    """Give the trials that have ended their places in the sequence of tells; those that had none."""
    mine = trials.c.study_id == study_id
    told = connection.execute(select(func.count()).where(mine, trials.c.told.is_not(None))).scalar_one()
    query = select(trials.c.number).where(mine, trials.c.told.is_(None), trials.c.state.in_(TERMINAL_STATES))
    numbers = list(connection.execute(query.order_by(trials.c.number)).scalars())
    for place, number in enumerate(numbers, told):
        connection.execute(sql.TELL, {"study": study_id, "trial": number, "place": place})
    return driver_queries.rows(connection, study_id, numbers)
