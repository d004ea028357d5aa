"""Holds the transactions of a trial's life except its claim: ask, report, finish, lose; for `Ledger.transact`.

Each may run twice, if it is unknown whether the first commit succeeded, so each is idempotent by its key or its fence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import case, false, select, update
from sqlalchemy.engine import Connection

from hpo.ledger import tags
from hpo.ledger.claims import Claim, bump, fenced, source
from hpo.ledger.database import statements as sql
from hpo.ledger.database.changes import announce
from hpo.ledger.database.json import plain, text
from hpo.ledger.database.tables import attempts, checkpoints, events, reports, studies, trials
from hpo.ledger.names import machine_dependent
from hpo.ledger.read import first
from hpo.ledger.rows import DecisionRow, NumberedCheckpoint
from hpo.space.trial_state import OPEN_STATES
from trainer.errors import Fenced
from trainer.report import CONTINUE, CheckpointRef, Outcome, Report, Verdict

REFUSED = "refused"  # the outcome of a trial that never began, since its configuration is invalid
THAWED = "thawed"  # the event of a trial that continued as a step of its study
MAX_LOSSES = 5  # attempts of one trial that may be lost to infrastructure; one more and it fails

# The state of a trial after an attempt with this outcome.
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

# The verdict that leads to an outcome; a trial that is stopped on a value that is not finite is infeasible.
_VERDICT_OF_OUTCOME = {"pruned": "stop", "nonfinite": "stop", "paused": "pause", "restarted": "restart_from"}

Decide = Callable[[Connection], Verdict | None]


@dataclass(frozen=True)
class Ask:
    """A trial to insert: the sampler's proposal and the configuration that follows from it."""

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
    descent: Mapping[str, Any] = field(default_factory=dict[str, Any])  # columns of `trials` if it continues another
    refused: str = ""  # the reason why the configuration is invalid; the trial then ends at once


@dataclass(frozen=True)
class TrialReport:
    """A report of the attempt that holds `claim`.

    `decide` is called inside the transaction if the strategy must decide. It returns None if the strategy cannot decide
    yet; the same report must then be committed again for its verdict.
    """

    claim: Claim
    report: Report
    decide: Decide | None = None
    strategy: str = "none"


# The driver's side


def ask(connection: Connection, study_id: int, proposals: Sequence[Ask], told: Sequence[tuple[int, int]] = ()) -> None:
    """Records tells (trial number, position in the sequence) and inserts waiting trials in one transaction."""
    for number, position in told:
        connection.execute(sql.TELL, {"study": study_id, "trial": number, "position": position})
    if proposals:
        announce(connection)
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


def go_on(connection: Connection, study_id: int, number: int, fence: int, asked: int) -> None:
    """Lets a paused trial wait for a worker again as a step of its study.

    fence  that of the trial's last attempt; a trial that has continued since stays as it is
    asked  the number of trials that were asked for before this step
    """
    where = (trials.c.study_id == study_id) & (trials.c.number == number)
    paused = where & (trials.c.state == "paused") & (trials.c.fence == fence)
    waits = {"state": "waiting", "values": None, "violations": None, "revision": trials.c.revision + 1}
    row = connection.execute(
        update(trials).where(paused).values(**waits).returning(trials.c.id, trials.c.revision)
    ).first()
    if row is not None:
        announce(connection)
        _event(connection, study_id, row.id, THAWED, {"asked": asked}, row.revision, f"{row.id}.{fence}.{THAWED}")


def lose(connection: Connection, trial_id: int, fence: int, why: str, *, counted: bool = True) -> None:
    """Takes a trial from an attempt whose worker is gone; the trial waits again, or fails after MAX_LOSSES.

    Only consecutive losses of attempts that committed no checkpoint count, so a trial that makes progress does not
    fail. A loss that is not the trial's fault, since its driver died first, is not `counted`; nobody saw when that
    attempt ended, so it ends with its last report or checkpoint.
    """
    saved = (checkpoints.c.trial_id == trial_id) & (checkpoints.c.fence == fence)
    progressed = not counted or connection.execute(select(checkpoints.c.id).where(saved).limit(1)).first() is not None
    failed = false() if progressed else trials.c.losses >= MAX_LOSSES
    row = connection.execute(
        update(trials)
        .where(trials.c.id == trial_id, trials.c.fence == fence, trials.c.state == "running")
        .values(
            state=case((failed, "failed"), else_="waiting"),
            outcome=case((failed, "lost"), else_=None),
            error=case((failed, f"its worker was lost {MAX_LOSSES + 1} times; last: {why}"), else_=None),
            ended_at=case((failed, time.time()), else_=None),
            losses=trials.c.losses if not counted else 1 if progressed else trials.c.losses + 1,
            fence=trials.c.fence + 1,  # refuses the lost worker's later transactions
            revision=trials.c.revision + 1,
        )
        .returning(trials.c.study_id, trials.c.revision)
    ).first()
    if row is not None:
        _end_attempt(
            connection, trial_id, fence, "lost", 0, None if counted else _last_sign(connection, trial_id, fence)
        )
        uid = f"{trial_id}.{fence}.worker_lost"
        _event(connection, row.study_id, trial_id, "worker_lost", {"fence": fence, "why": why}, row.revision, uid)


def note(connection: Connection, study_id: int, kind: str, fields: Mapping[str, object], uid: str) -> None:
    """Records an event of the study itself; the caller makes a `uid` for each event."""
    bump = update(studies).where(studies.c.id == study_id).values(revision=studies.c.revision + 1)
    revision = connection.execute(bump.returning(studies.c.revision)).scalar_one()
    _event(connection, study_id, None, kind, fields, revision, uid)


# The worker's side


def commit(connection: Connection, reports: Sequence[TrialReport]) -> list[Verdict | Fenced | None]:
    """Commits reports of different trials, one or many, in this transaction. Returns an answer for each: a verdict,
    Fenced if the trial belongs to another attempt, None if the strategy cannot decide yet."""
    answers: list[Verdict | Fenced | None] = []
    for trial in reports:
        claim, report = trial.claim, trial.report
        row = {"trial": claim.trial_id, "held": claim.fence, "at_step": report.step, "at_epoch": report.epoch or 0}
        revision = connection.execute(sql.ADVANCE, row).scalar()
        answers.append(fenced(claim) if revision is None else _commit(connection, trial, revision))
    return answers


def _commit(connection: Connection, trial: TrialReport, revision: int) -> Verdict | None:
    claim, report = trial.claim, trial.report
    row = {"trial": claim.trial_id, "held": claim.fence, "at_step": report.step}
    connection.execute(sql.STEP_ATTEMPT, row)
    if report.step <= claim.high_step:
        _compare(connection, claim, report, revision)
    if report.metrics:
        _insert_values(connection, claim, report, revision)
    if report.checkpoint is not None:
        _insert_checkpoint(connection, claim, report.checkpoint, revision)
    if trial.decide is None:
        return CONTINUE
    return _stored_decision(connection, claim, report) or _decide(connection, trial, trial.decide, revision)


def _insert_values(connection: Connection, claim: Claim, report: Report, revision: int) -> None:
    shared = {
        "trial_id": claim.trial_id,
        "step": report.step,
        "fold": report.fold,
        "epoch": report.epoch,
        "fence": claim.fence,
        "revision": revision,
        "at": time.time(),
    }
    rows = [
        shared | {"key": key, "value": None if value != value else float(value)}
        for key, value in report.metrics.items()
    ]
    connection.execute(sql.insert_new(connection, reports), rows)


def _compare(connection: Connection, claim: Claim, report: Report, revision: int) -> None:
    """Records an event if a replay differs from the first value, which stands. Metrics of the machine may differ."""
    report_key = {"trial": claim.trial_id, "at_step": report.step, "fold": report.fold}
    stored = {
        key: math.nan if value is None else value for key, value in connection.execute(sql.FIRST_VALUES, report_key)
    }
    differing = {
        key: {"first": stored[key], "replay": value}
        for key, value in report.metrics.items()
        if key in stored and not machine_dependent(key) and repr(stored[key]) != repr(float(value))
    }
    if differing:
        fields = {"step": report.step, "metrics": differing}
        uid = f"{claim.trial_id}.{claim.fence}.{report.step}.{report.fold}.differs"
        _event(connection, claim.study_id, claim.trial_id, "replay_differs", fields, revision, uid)


def _insert_checkpoint(connection: Connection, claim: Claim, ref: CheckpointRef, revision: int) -> None:
    row = {"trial_id": claim.trial_id, "step": ref.step, "epoch": ref.epoch, "path": ref.path.name}
    row |= {"sha256": ref.sha256, "size": ref.size, "state": "kept", "metrics": plain(dict(ref.metrics))}
    row |= {"fence": claim.fence, "revision": revision, "at": time.time()}
    connection.execute(sql.insert_new(connection, checkpoints), row)


def _stored_decision(connection: Connection, claim: Claim, report: Report) -> Verdict | None:
    report_key = {"trial": claim.trial_id, "at_step": report.step, "fold": report.fold}
    row = first(DecisionRow, connection.execute(sql.DECISION, report_key))
    if row is None:
        return None
    if row.obeyed is not None:
        return CONTINUE
    return Verdict(row.verdict, row.step, row.reason, row.checkpoint, row.params)


def _decide(connection: Connection, trial: TrialReport, decide: Decide, revision: int) -> Verdict | None:
    verdict = decide(connection)
    if verdict is None:
        return None
    claim, step = trial.claim, trial.report.step
    if verdict.kind == "restart_from":
        _check_source(connection, trial, verdict)
    row = {"trial_id": claim.trial_id, "step": step, "fold": trial.report.fold, "verdict": verdict.kind}
    row |= {"reason": text(verdict.reason), "checkpoint": verdict.checkpoint, "params": plain(dict(verdict.params))}
    row |= {"strategy": trial.strategy, "fence": claim.fence, "revision": revision}
    connection.execute(sql.INSERT_DECISION, row)
    return Verdict(verdict.kind, step, verdict.reason, verdict.checkpoint, verdict.params)


def _check_source(connection: Connection, trial: TrialReport, verdict: Verdict) -> None:
    """Raises ValueError for a checkpoint that is not kept, or of an earlier step, whose values would be recorded
    twice."""
    claim, step = trial.claim, trial.report.step
    checkpoint = verdict.checkpoint or "0/"
    where = source(claim.study_id, checkpoint)
    row = first(NumberedCheckpoint, connection.execute(sql.LOCKED_SOURCE, where))
    if row is None or row.state != "kept" or row.step < step:
        raise ValueError(
            f"strategy {trial.strategy} restarts trial {claim.number} at step {step} from "
            f"{verdict.checkpoint!r}: name a kept checkpoint of this step or a later one, as <trial number>/<path>."
        )


def tag(connection: Connection, taken: Claim, given: Mapping[str, str]) -> None:
    """Gives the trial tags. Raises Fenced if another attempt has the trial."""
    bump(connection, taken)
    tags.put_held(connection, taken, given)


def record(connection: Connection, taken: Claim, kind: str, fields: Mapping[str, object], uid: str) -> None:
    """Records an event of a trial; the caller makes a `uid` for each event. Raises Fenced if another attempt has it."""
    revision = bump(connection, taken)
    _event(connection, taken.study_id, taken.trial_id, kind, fields, revision, uid)


def attach(connection: Connection, trial_id: int, fence: int, events_: Mapping[str, Mapping[str, object]]) -> bool:
    """Records artifact events, uid -> fields, from outside the trial's attempts.

    Returns False if the trial's fence is no longer `fence`: a later attempt may sweep these files without knowing them.
    """
    bump = update(trials).where(trials.c.id == trial_id, trials.c.fence == fence)
    bump = bump.values(revision=trials.c.revision + 1).returning(trials.c.study_id, trials.c.revision)
    row = connection.execute(bump).first()
    if row is None:
        return False
    for uid, fields in events_.items():
        _event(connection, row.study_id, trial_id, "artifact", fields, row.revision, uid)
    return True


def finish(
    connection: Connection,
    taken: Claim,
    outcome: Outcome,
    values: Sequence[float | None] | None,
    violations: Sequence[float] | None = None,
) -> None:
    """Ends the attempt and sets the trial's next state. Raises Fenced if another attempt has it. Idempotent."""
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
    """Marks the strategy's decision as obeyed, so that a replay of its report continues."""
    attempt = {"trial": taken.trial_id, "held": taken.fence}
    for row in connection.execute(sql.OBEY, attempt | {"kind": verdict}).all():
        if verdict == "restart_from":
            parent = source(taken.study_id, row.checkpoint)["trial_number"]
            connection.execute(sql.DESCEND, {"trial": taken.trial_id, "ancestor": parent})
            fields = {"parent": parent, "checkpoint": row.checkpoint, "params": row.params, "step": row.step}
            uid = f"{taken.trial_id}.{taken.fence}.restarted"
            _event(connection, taken.study_id, taken.trial_id, "restarted", fields, revision, uid)


def _end_attempt(
    connection: Connection, trial_id: int, fence: int, outcome: str, step: int, at: float | None = None
) -> None:
    """Records that an attempt has ended, now or at an earlier time."""
    row = {"trial": trial_id, "held": fence, "ended_as": outcome, "last_step": step}
    connection.execute(sql.END_ATTEMPT, row | {"ended": time.time() if at is None else at})
    announce(connection)


def _last_sign(connection: Connection, trial_id: int, fence: int) -> float:
    """Returns when an attempt last reported or saved a checkpoint, or when it began if it did neither."""
    return max(connection.execute(sql.SIGNS_OF_LIFE, {"trial": trial_id, "held": fence}).scalars())


def _ended_as(connection: Connection, taken: Claim, outcome: str) -> bool:
    """Returns whether this attempt has ended with this outcome, which means that an earlier try was committed."""
    attempt = (attempts.c.trial_id == taken.trial_id) & (attempts.c.fence == taken.fence)
    return connection.execute(select(attempts.c.outcome).where(attempt)).scalar() == outcome


def _event(
    connection: Connection,
    study_id: int,
    trial_id: int | None,
    kind: str,
    fields: Mapping[str, object],
    revision: int,
    uid: str,
) -> None:
    row = {"study_id": study_id, "trial_id": trial_id, "kind": kind, "fields": plain(fields), "revision": revision}
    connection.execute(sql.insert_new(connection, events), row | {"uid": uid, "at": time.time()})
