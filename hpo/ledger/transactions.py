"""The transactions of a trial's life except its claim: ask, report, finish, lose. Bodies for `Ledger.transact`.

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
from hpo.ledger import tags
from hpo.ledger.claims import Claim, begin_earlier, fenced, source
from hpo.ledger.json import plain, text
from hpo.ledger.names import machine_dependent
from hpo.ledger.process_id import Process
from hpo.ledger.tables import attempts, checkpoints, events, reports, studies, trials, workers
from hpo.space.trial_state import OPEN_STATES
from trainer.errors import Fenced
from trainer.report import CONTINUE, CheckpointRef, Outcome, Verdict

REFUSED = "refused"  # the outcome of a trial that was never begun: its configuration cannot be
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
    "unreported": "failed",
}

# The verdict by which an attempt ends so; what is stopped on a value that is not finite is infeasible.
_VERDICT_OF_OUTCOME = {"pruned": "stop", "nonfinite": "stop", "paused": "pause", "restarted": "restart_from"}

Decide = Callable[[Connection], Verdict | None]


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
    trial_attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    study_attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ranks: int = 1
    descent: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of `trials`, where it begins from another
    refused: str = ""  # why no such configuration can be: the trial ends as it is asked for


@dataclass(frozen=True)
class TrialReport:
    """One lane's report. `decide` is called inside the transaction when the strategy is to be asked; None, and the same
    report has to come again for its verdict."""

    claim: Claim
    step: int
    metrics: Mapping[str, float]
    epoch: int | None = None
    fold: int = 0
    checkpoint: CheckpointRef | None = None
    checkpoint_path: str = ""  # relative, as the row stores it
    decide: Decide | None = None
    strategy: str = "none"


# The driver's side


def ask(connection: Connection, study_id: int, proposals: Sequence[Ask], told: Sequence[tuple[int, int]] = ()) -> None:
    """Record tells (trial number, place in the sequence) and insert waiting trials, at once."""
    for number, place in told:
        connection.execute(sql.TELL, {"study": study_id, "trial": number, "place": place})
    now = time.time()
    for proposal in proposals:
        row = {"study_id": study_id, "number": proposal.number, "state": "waiting", "revision": 1, "created_at": now}
        row |= {"ranks": proposal.ranks, **proposal.descent}
        if proposal.refused:
            row |= {"state": "infeasible", "outcome": REFUSED, "error": text(proposal.refused), "ended_at": now}
        trial_id = connection.execute(sql.insert_trial(connection), row).scalar()
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

    Only losses in a row count, and only of attempts that committed no checkpoint, since the last one that did: what
    gets on is not given up. A loss for which the trial is not to blame, since its driver died first, is not `counted`.
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


def commit(connection: Connection, lanes: Sequence[TrialReport]) -> list[Verdict | Fenced | None]:
    """Commit the reports of a group of lanes, one or many, in this transaction; one answer per lane, None where what
    decides is not known yet."""
    answers: list[Verdict | Fenced | None] = []
    for lane in lanes:
        at = {"at_step": lane.step, "at_epoch": lane.epoch or 0}
        held = {"trial": lane.claim.trial_id, "held": lane.claim.fence}
        revision = connection.execute(sql.ADVANCE, held | at).scalar()
        answers.append(fenced(lane.claim) if revision is None else _commit_lane(connection, lane, revision))
    return answers


def _commit_lane(connection: Connection, lane: TrialReport, revision: int) -> Verdict | None:
    held = {"trial": lane.claim.trial_id, "held": lane.claim.fence}
    connection.execute(sql.STEP_ATTEMPT, held | {"at_step": lane.step})
    if lane.step <= lane.claim.high_step:
        _compare(connection, lane, revision)
    if lane.metrics:
        _insert_values(connection, lane, revision)
    if lane.checkpoint is not None:
        _insert_checkpoint(connection, lane, lane.checkpoint, revision)
    if lane.decide is None:
        return CONTINUE
    return _stored_decision(connection, lane) or _decide(connection, lane, lane.decide, revision)


def _insert_values(connection: Connection, lane: TrialReport, revision: int) -> None:
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


def _compare(connection: Connection, lane: TrialReport, revision: int) -> None:
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


def _insert_checkpoint(connection: Connection, lane: TrialReport, ref: CheckpointRef, revision: int) -> None:
    row = {"trial_id": lane.claim.trial_id, "step": ref.step, "epoch": ref.epoch, "path": lane.checkpoint_path}
    row |= {"sha256": ref.sha256, "size": ref.size, "state": "kept", "metrics": plain(dict(ref.metrics))}
    row |= {"fence": lane.claim.fence, "revision": revision, "at": time.time()}
    connection.execute(sql.insert_new(connection, checkpoints), row)


def _stored_decision(connection: Connection, lane: TrialReport) -> Verdict | None:
    at = {"trial": lane.claim.trial_id, "at_step": lane.step, "fold": lane.fold}
    row = connection.execute(sql.DECISION, at).mappings().first()
    if row is None:
        return None
    if row["obeyed"] is not None:
        return CONTINUE
    return Verdict(row["verdict"], row["step"], row["reason"], row["checkpoint"], row["params"])


def _decide(connection: Connection, lane: TrialReport, decide: Decide, revision: int) -> Verdict | None:
    verdict = decide(connection)
    if verdict is None:
        return None
    if verdict.kind == "restart_from":
        _check_source(connection, lane, verdict)
    row = {"trial_id": lane.claim.trial_id, "step": lane.step, "fold": lane.fold, "verdict": verdict.kind}
    row |= {"reason": text(verdict.reason), "checkpoint": verdict.checkpoint, "params": plain(dict(verdict.params))}
    row |= {"strategy": lane.strategy, "fence": lane.claim.fence, "revision": revision}
    connection.execute(sql.INSERT_DECISION, row)
    return Verdict(verdict.kind, lane.step, verdict.reason, verdict.checkpoint, verdict.params)


def _check_source(connection: Connection, lane: TrialReport, verdict: Verdict) -> None:
    """Raise ValueError unless the trial can go on from there: values stand once per step, so not from before."""
    where = source(lane.claim.study_id, verdict.checkpoint or "0/")
    found = connection.execute(sql.LOCKED_SOURCE, where).mappings().first()
    if found is None or found["state"] != "kept" or found["step"] < lane.step:
        raise ValueError(
            f"strategy {lane.strategy} restarts trial {lane.claim.number} at step {lane.step} from "
            f"{verdict.checkpoint!r}: name a kept checkpoint of this step or a later one, as <trial number>/<path>."
        )


def tag(connection: Connection, taken: Claim, given: Mapping[str, str]) -> None:
    """Give the trial tags; raise Fenced if it is another's."""
    _bump(connection, taken)
    tags.put_held(connection, taken, given)


def record(connection: Connection, taken: Claim, kind: str, fields: Mapping[str, Any], uid: str) -> None:
    """Record an event of a trial, `uid` made by the caller once per event; raise Fenced if the trial is another's."""
    revision = _bump(connection, taken)
    _event(connection, taken.study_id, taken.trial_id, kind, fields, revision, uid)


def attach(connection: Connection, trial_id: int, fence: int, events_: Mapping[str, Mapping[str, Any]]) -> bool:
    """Record artifact events, uid -> fields, from outside of the trial's attempts; False if it has gone on since it
    had `fence`, so that whoever sweeps its files now may not know of these."""
    bump = update(trials).where(trials.c.id == trial_id, trials.c.fence == fence)
    bump = bump.values(revision=trials.c.revision + 1).returning(trials.c.study_id, trials.c.revision)
    row = connection.execute(bump).first()
    if row is None:
        return False
    for uid, fields in events_.items():
        _event(connection, row.study_id, trial_id, "artifact", fields, row.revision, uid)
    return True


def set_checkpoints(connection: Connection, taken: Claim, changes: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Change rows of the trial's checkpoints, path -> column -> value: state (kept, deleted, damaged) or best.

    Returns the paths that were not deleted, since another trial is to start from them. Raises Fenced if the trial is
    another's.
    """
    revision = _bump(connection, taken)
    dropped = [path for path, values in changes.items() if values.get("state") == "deleted"]
    needed = _needed(connection, taken, dropped) if dropped else set[str]()
    for path, values in changes.items():
        left = {key: value for key, value in values.items() if path not in needed or key != "state"}
        row = (checkpoints.c.trial_id == taken.trial_id) & (checkpoints.c.path == path)
        if left:
            connection.execute(update(checkpoints).where(row).values(revision=revision, **left))
    if any(values.get("state") == "damaged" for values in changes.values()):
        begin_earlier(connection, taken)
    return needed


def _needed(connection: Connection, taken: Claim, paths: Sequence[str]) -> set[str]:
    connection.execute(sql.LOCK_CHECKPOINTS, {"trial": taken.trial_id, "paths": list(paths)})
    paths_of = {f"{taken.number}/{path}": path for path in paths}
    found = connection.execute(sql.NEEDED, {"study": taken.study_id, "sources": list(paths_of)}).scalars()
    return {paths_of[one] for one in found}


def committed_paths(connection: Connection, taken: Claim) -> set[str]:
    """The paths of the trial's kept checkpoints as of now, whoever holds it."""
    return {row["path"] for row in connection.execute(sql.KEPT, {"trial": taken.trial_id}).mappings()}


def finish(
    connection: Connection,
    taken: Claim,
    outcome: Outcome,
    values: Sequence[float | None] | None,
    violations: Sequence[float] | None = None,
) -> None:
    """End the attempt and move the trial on; raise Fenced if it is another's. A repeat of the same is harmless."""
    state = STATE_OF_OUTCOME[outcome.kind]
    now = time.time()
    row = {
        "trial": taken.trial_id,
        "held": taken.fence,
        "new_state": state,
        "new_outcome": outcome.kind,
        "new_values": None if values is None else list(values),
        "new_violations": None if violations is None else list(violations),
        "new_error": text(outcome.error) or None,
        "new_traceback": text(outcome.traceback) or None,
        "ended": None if state in OPEN_STATES else now,
    }
    revision = connection.execute(sql.FINISH, row).scalar()
    if revision is None:
        if not _ended_as(connection, taken, outcome.kind):
            raise fenced(taken)
        return
    _end_attempt(connection, taken.trial_id, taken.fence, outcome.kind, outcome.step)
    if verdict := _VERDICT_OF_OUTCOME.get(outcome.kind):
        _obey(connection, taken, verdict, revision)


def _obey(connection: Connection, taken: Claim, verdict: str, revision: int) -> None:
    """The attempt has ended by the strategy's decision: a replay of that report goes on."""
    held = {"trial": taken.trial_id, "held": taken.fence}
    for row in connection.execute(sql.OBEY, held | {"kind": verdict}).all():
        if verdict == "restart_from":
            parent = source(taken.study_id, row.checkpoint)["trial_number"]
            connection.execute(sql.DESCEND, {"trial": taken.trial_id, "ancestor": parent})
            fields = {"parent": parent, "checkpoint": row.checkpoint, "params": row.params, "step": row.step}
            uid = f"{taken.trial_id}.{taken.fence}.restarted"
            _event(connection, taken.study_id, taken.trial_id, "restarted", fields, revision, uid)


def _end_attempt(connection: Connection, trial_id: int, fence: int, outcome: str, step: int) -> None:
    row = {"trial": trial_id, "held": fence, "ended_as": outcome, "ended": time.time(), "last_step": step}
    connection.execute(sql.END_ATTEMPT, row)


def _ended_as(connection: Connection, taken: Claim, outcome: str) -> bool:
    """Whether this very attempt has ended so: the first try went through, whatever became of the trial since."""
    mine = (attempts.c.trial_id == taken.trial_id) & (attempts.c.fence == taken.fence)
    return connection.execute(select(attempts.c.outcome).where(mine)).scalar() == outcome


def _bump(connection: Connection, taken: Claim) -> int:
    revision = connection.execute(sql.BUMP, {"trial": taken.trial_id, "held": taken.fence}).scalar()
    if revision is None:
        raise fenced(taken)
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
