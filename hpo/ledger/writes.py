"""The transactions of a trial's life: ask, claim, report, finish, lose. Bodies for `Ledger.transact`.

Each takes a Connection inside a write transaction and may run twice if the first commit's fate was unknown; each is
therefore idempotent, by its key or by its fence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import case, false, select, update
from sqlalchemy.engine import Connection

from hpo.ledger import statements as sql
from hpo.ledger.process import Process
from hpo.ledger.tables import (
    OPEN_STATES,
    checkpoints,
    events,
    machine_dependent,
    reports,
    studies,
    trials,
    workers,
)
from trainer.errors import Fenced
from trainer.report import CONTINUE, CheckpointRef, Outcome, Verdict

MAX_LOSSES = 5  # attempts of one trial that may be lost to infrastructure; one more and it fails

# What an ended attempt makes of its trial.
STATE_OF_OUTCOME = {
    "complete": "complete",
    "pruned": "pruned",
    "paused": "paused",
    "restarted": "waiting",
    "preempted": "waiting",
    "nonfinite": "infeasible",
    "out_of_memory": "infeasible",
    "infeasible": "infeasible",
    "user_error": "failed",
    "bad_config": "failed",
}

Decide = Callable[[Connection], Verdict]


@dataclass(frozen=True)
class Ask:
    """A trial to be: what the sampler proposed and what came of it."""

    number: int
    draw: int
    seed: int
    told: int
    params: Mapping[str, Any]
    coordinates: Mapping[str, Any]
    config: Mapping[str, Any]
    config_hash: str
    trial_attrs: Mapping[str, Any] = field(default_factory=dict)
    study_attrs: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1


@dataclass(frozen=True)
class Claim:
    """A trial taken by a worker; `fence` is its proof in every later transaction."""

    trial_id: int
    study_id: int
    number: int
    fence: int
    high_step: int  # the highest reported by earlier attempts
    params: Mapping[str, Any]
    config: Mapping[str, Any]
    config_hash: str
    committed: tuple[Mapping[str, Any], ...]  # rows of its kept checkpoints, newest first


@dataclass(frozen=True)
class LaneReport:
    """One lane's report. `decide` is called inside the transaction when the strategy is to be asked."""

    claim: Claim
    step: int
    metrics: Mapping[str, float]
    epoch: int | None = None
    fold: int = 0
    checkpoint: CheckpointRef | None = None
    checkpoint_path: str = ""  # relative, as the row stores it
    decide: Decide | None = None
    strategy: str = "none"


def plain(value: Any) -> Any:
    """`value` as JSON that every database accepts: non-finite floats become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


# The driver's side


def ask(connection: Connection, study_id: int, proposals: Sequence[Ask], told: Sequence[tuple[int, int]] = ()) -> None:
    """Record tells (trial number, place in the sequence) and insert waiting trials, at once."""
    for number, place in told:
        connection.execute(sql.TELL, {"study": study_id, "trial": number, "place": place})
    now = time.time()
    for proposal in proposals:
        row = {"study_id": study_id, "number": proposal.number, "state": "waiting", "revision": 1, "created_at": now}
        trial_id = connection.execute(sql.insert_trial(connection), row | {"ranks": proposal.ranks}).scalar()
        if trial_id is not None:
            connection.execute(
                sql.INSERT_ASK,
                {
                    "trial_id": trial_id,
                    "draw": proposal.draw,
                    "seed": proposal.seed,
                    "told": proposal.told,
                    "params": dict(proposal.params),
                    "coordinates": dict(proposal.coordinates),
                    "config": dict(proposal.config),
                    "config_hash": proposal.config_hash,
                    "trial_attrs": dict(proposal.trial_attrs),
                    "study_attrs": dict(proposal.study_attrs),
                },
            )


def lose(connection: Connection, trial_id: int, fence: int, why: str, *, counted: bool = True) -> None:
    """Take a trial from an attempt whose worker is gone; it waits again, or fails after MAX_LOSSES.

    Only losses in a row count, and only of attempts that committed no checkpoint: what gets on is not given up. A loss
    for which the trial is not to blame, since its driver died first, is not `counted`.
    """
    mine = (checkpoints.c.trial_id == trial_id) & (checkpoints.c.fence == fence)
    got_on = not counted or connection.execute(select(checkpoints.c.id).where(mine).limit(1)).first() is not None
    failed = false() if got_on else trials.c.losses >= MAX_LOSSES
    row = connection.execute(
        update(trials)
        .where(trials.c.id == trial_id, trials.c.fence == fence, trials.c.state == "running")
        .values(
            state=case((failed, "failed"), else_="waiting"),
            outcome=case((failed, "lost"), else_=None),
            error=case((failed, f"its worker was lost {MAX_LOSSES + 1} times; last: {why}"), else_=None),
            ended_at=case((failed, time.time()), else_=None),
            losses=trials.c.losses if not counted else 1 if got_on else trials.c.losses + 1,
            fence=trials.c.fence + 1,  # what the lost worker still tries is refused from here on
            revision=trials.c.revision + 1,
        )
        .returning(trials.c.study_id, trials.c.revision)
    ).first()
    if row is not None:
        _end_attempt(connection, trial_id, fence, "lost", 0)
        uid = f"{trial_id}.{fence}.worker_lost"
        _event(connection, row.study_id, trial_id, "worker_lost", {"fence": fence, "why": why}, row.revision, uid)


def note(connection: Connection, study_id: int, kind: str, fields: Mapping[str, Any], uid: str) -> None:
    """Record an event of the study itself; `uid` is made by the caller, once per event."""
    bump = update(studies).where(studies.c.id == study_id).values(revision=studies.c.revision + 1)
    revision = connection.execute(bump.returning(studies.c.revision)).scalar_one()
    _event(connection, study_id, None, kind, fields, revision, uid)


# The worker's side


def register(connection: Connection, process: Process, executor: str, slots: int = 1) -> None:
    """Announce a worker."""
    row = {"id": process.id, "host": process.host, "pid": process.pid, "pid_started": process.started}
    row |= {"slots": slots, "executor": executor, "started_at": time.time()}
    connection.execute(sql.insert_new(connection, workers), row)


def unregister(connection: Connection, process: Process) -> None:
    """Say that a worker left in good order."""
    connection.execute(update(workers).where(workers.c.id == process.id).values(ended_at=time.time()))


def claim(connection: Connection, worker_id: str, n: int = 1, study_id: int | None = None) -> list[Claim]:
    """Take up to `n` waiting trials, lowest numbers first, each with a new fence.

    A retried commit that had gone through leaves a trial running that the worker never heard of; its lease then runs
    out like that of a dead worker.
    """
    query, scope = (sql.WAITING, {}) if study_id is None else (sql.WAITING_OF_STUDY, {"study": study_id})
    found = connection.execute(query, {"n": n, **scope}).scalars().all()
    return [_take(connection, worker_id, trial_id) for trial_id in found]


def _take(connection: Connection, worker_id: str, trial_id: int) -> Claim:
    now = time.time()
    row = connection.execute(sql.TAKE, {"trial": trial_id, "now": now}).one()
    kept: tuple[Mapping[str, Any], ...] = ()
    if row.fence > 1:
        kept = tuple(dict(found) for found in connection.execute(sql.KEPT, {"trial": trial_id}).mappings())
    from_step = kept[0]["step"] if kept else 0
    attempt = {"trial_id": trial_id, "fence": row.fence, "worker_id": worker_id, "started_at": now}
    connection.execute(sql.INSERT_ATTEMPT, attempt | {"from_step": from_step, "step": from_step})
    asked = connection.execute(sql.ASKED, {"trial": trial_id}).one()
    return Claim(trial_id, row.study_id, row.number, row.fence, row.step, *asked, committed=kept)


def renew(connection: Connection, taken: Claim) -> None:
    """Show that the worker is alive; raise Fenced if the trial is another's."""
    if connection.execute(sql.RENEW, {"trial": taken.trial_id, "held": taken.fence}).rowcount != 1:
        raise _fenced(taken)


def commit(connection: Connection, lanes: Sequence[LaneReport]) -> list[Verdict | Fenced]:
    """Commit the reports of a group of lanes, one or many, in this transaction; one answer per lane."""
    answers: list[Verdict | Fenced] = []
    for lane in lanes:
        at = {"at_step": lane.step, "at_epoch": lane.epoch or 0}
        held = {"trial": lane.claim.trial_id, "held": lane.claim.fence}
        revision = connection.execute(sql.ADVANCE, held | at).scalar()
        answers.append(_fenced(lane.claim) if revision is None else _commit_lane(connection, lane, revision))
    return answers


def _commit_lane(connection: Connection, lane: LaneReport, revision: int) -> Verdict:
    if lane.step <= lane.claim.high_step:
        _compare(connection, lane, revision)
    if lane.metrics:
        _insert_values(connection, lane, revision)
    if lane.checkpoint is not None:
        _insert_checkpoint(connection, lane, lane.checkpoint, revision)
    if lane.decide is None:
        return CONTINUE
    return _stored_decision(connection, lane) or _decide(connection, lane, lane.decide, revision)


def _insert_values(connection: Connection, lane: LaneReport, revision: int) -> None:
    shared = {
        "trial_id": lane.claim.trial_id,
        "step": lane.step,
        "fold": lane.fold,
        "epoch": lane.epoch,
        "fence": lane.claim.fence,
        "revision": revision,
        "at": time.time(),
    }
    rows = [
        shared | {"key": key, "value": None if value != value else float(value)} for key, value in lane.metrics.items()
    ]
    connection.execute(sql.insert_new(connection, reports), rows)


def _compare(connection: Connection, lane: LaneReport, revision: int) -> None:
    """The first value stands; say where a replay gave another one. What the machine decides may differ."""
    at = {"trial": lane.claim.trial_id, "at_step": lane.step, "fold": lane.fold}
    first = {key: math.nan if value is None else value for key, value in connection.execute(sql.FIRST_VALUES, at)}
    differing = {
        key: {"first": first[key], "replay": value}
        for key, value in lane.metrics.items()
        if key in first and not machine_dependent(key) and repr(first[key]) != repr(float(value))
    }
    if differing:
        fields = {"step": lane.step, "metrics": differing}
        uid = f"{lane.claim.trial_id}.{lane.claim.fence}.{lane.step}.{lane.fold}.differs"
        _event(connection, lane.claim.study_id, lane.claim.trial_id, "replay_differs", fields, revision, uid)


def _insert_checkpoint(connection: Connection, lane: LaneReport, ref: CheckpointRef, revision: int) -> None:
    row = {"trial_id": lane.claim.trial_id, "step": ref.step, "epoch": ref.epoch, "path": lane.checkpoint_path}
    row |= {"sha256": ref.sha256, "size": ref.size, "state": "kept", "metrics": plain(dict(lane.metrics))}
    row |= {"fence": lane.claim.fence, "revision": revision, "at": time.time()}
    connection.execute(sql.insert_new(connection, checkpoints), row)


def _stored_decision(connection: Connection, lane: LaneReport) -> Verdict | None:
    at = {"trial": lane.claim.trial_id, "at_step": lane.step, "fold": lane.fold}
    row = connection.execute(sql.DECISION, at).mappings().first()
    if row is None:
        return None
    return Verdict(row["verdict"], row["step"], row["reason"], row["checkpoint"], row["params"])


def _decide(connection: Connection, lane: LaneReport, decide: Decide, revision: int) -> Verdict:
    verdict = decide(connection)
    row = {"trial_id": lane.claim.trial_id, "step": lane.step, "fold": lane.fold, "verdict": verdict.kind}
    row |= {"reason": verdict.reason, "checkpoint": verdict.checkpoint, "params": dict(verdict.params)}
    row |= {"strategy": lane.strategy, "fence": lane.claim.fence, "revision": revision}
    connection.execute(sql.INSERT_DECISION, row)
    return Verdict(verdict.kind, lane.step, verdict.reason, verdict.checkpoint, verdict.params)


def record(connection: Connection, taken: Claim, kind: str, fields: Mapping[str, Any], uid: str) -> None:
    """Record an event of a trial, `uid` made by the caller once per event; raise Fenced if the trial is another's."""
    revision = _bump(connection, taken)
    _event(connection, taken.study_id, taken.trial_id, kind, fields, revision, uid)


def set_checkpoint(connection: Connection, taken: Claim, path: str, **values: Any) -> None:
    """Change a checkpoint's row: state (kept, deleted, damaged) or best; raise Fenced if the trial is another's."""
    revision = _bump(connection, taken)
    row = (checkpoints.c.trial_id == taken.trial_id) & (checkpoints.c.path == path)
    connection.execute(update(checkpoints).where(row).values(revision=revision, **values))


def finish(connection: Connection, taken: Claim, outcome: Outcome, values: Sequence[float | None] | None) -> None:
    """End the attempt and move the trial on; raise Fenced if it is another's. A repeat of the same is harmless."""
    state = STATE_OF_OUTCOME[outcome.kind]
    now = time.time()
    row = {
        "trial": taken.trial_id,
        "held": taken.fence,
        "new_state": state,
        "new_outcome": outcome.kind,
        "new_values": None if values is None else list(values),
        "new_error": outcome.error or None,
        "new_traceback": outcome.traceback or None,
        "ended": None if state in OPEN_STATES else now,
    }
    if connection.execute(sql.FINISH, row).rowcount != 1 and not _finished_so(connection, taken, state):
        raise _fenced(taken)
    _end_attempt(connection, taken.trial_id, taken.fence, outcome.kind, outcome.step)


def _end_attempt(connection: Connection, trial_id: int, fence: int, outcome: str, step: int) -> None:
    row = {"trial": trial_id, "held": fence, "ended_as": outcome, "ended": time.time(), "last_step": step}
    connection.execute(sql.END_ATTEMPT, row)


def _finished_so(connection: Connection, taken: Claim, state: str) -> bool:
    same = (trials.c.id == taken.trial_id) & (trials.c.fence == taken.fence) & (trials.c.state == state)
    return connection.execute(select(trials.c.id).where(same)).first() is not None


def _bump(connection: Connection, taken: Claim) -> int:
    revision = connection.execute(sql.BUMP, {"trial": taken.trial_id, "held": taken.fence}).scalar()
    if revision is None:
        raise _fenced(taken)
    return revision


def _event(
    connection: Connection,
    study_id: int,
    trial_id: int | None,
    kind: str,
    fields: Mapping[str, Any],
    revision: int,
    uid: str,
) -> None:
    row = {"study_id": study_id, "trial_id": trial_id, "kind": kind, "fields": plain(fields), "revision": revision}
    connection.execute(sql.insert_new(connection, events), row | {"uid": uid, "at": time.time()})


def _fenced(taken: Claim) -> Fenced:
    return Fenced(f"trial {taken.number} was taken from this attempt (fence {taken.fence}).")
