"""Checks the ledger against its own rules: numbers, ends, attempts, leases, tells, decisions, best flags."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from hpo.driver.end_reason import goal_of
from hpo.ledger import Ledger, leases, queries, removed
from hpo.ledger.checkpoints import best_of, monitored
from hpo.ledger.process_id import is_dead
from hpo.ledger.rows import ConfiguredCheckpoint, Connection, StudyRow, TrialRow
from hpo.ledger.views import driver as driver_queries
from hpo.ledger.views import verify as verify_queries
from hpo.search.promotion.base import promoting
from hpo.space.trial_state import OPEN_STATES, TERMINAL_STATES
from hpo.text import command, counted
from hpo.tracking.trackers import leases_of
from hpo.verify.report import Report

Rows = Sequence[TrialRow]
_FREED_BY = {"driver": "resume", "mirror": "sync", "alerts": "resume"}  # keyed by the first part of a lease's name


def integrity(connection: Connection) -> list[str]:
    """Returns the faults that SQLite itself finds in the file."""
    broken = [f"ledger: {line}" for line in verify_queries.integrity_check(connection)]
    lost = verify_queries.foreign_key_check(connection)
    return broken + [f"ledger: a row of {table} points to no row of {parent}" for table, parent in lost]


def check(ledger: Ledger, study: StudyRow, report: Report) -> bool:
    """Reports broken rules; returns whether the trials' rows are sound enough for further checks."""
    name = study.name
    report.counts["studies"] += 1

    def body(connection: Connection) -> tuple[list[str], list[str]]:
        study_id: int = study.id
        rows = verify_queries.trial_rows(connection, study_id)
        alive = queries.study_state(connection, study) == "running"
        report.counts["trials"] += len(rows)
        report.counts["reports"] += verify_queries.count_reports(connection, study_id)
        asks, ends = _asks(connection, study_id, rows), _ends(connection, study_id, rows)
        broken = list(chain(_numbers(rows), asks, ends, _values(study, rows)))
        rest = (
            []
            if broken
            else chain(
                _attempts(connection, study, rows, alive, report),
                _tells(rows),
                _complete(connection, study, rows),
                _decisions(connection, study_id, rows),
                _descent(rows),
                _best(connection, study_id),
                _removals(connection, study),
            )
        )
        return broken, [*_leases(connection, study, report), *rest]

    broken, rest = ledger.look(body)
    report.differences += [f"{name}: {text}" for text in (*broken, *rest)]
    return not broken


def _numbers(rows: Rows) -> Iterator[str]:
    numbers = [row.number for row in rows]
    if numbers != list(range(len(numbers))):
        yield f"the trials' numbers are not 0 to {len(numbers) - 1}: {numbers}"


def _asks(connection: Connection, study_id: int, rows: Rows) -> Iterator[str]:
    with_ask = verify_queries.asked(connection, study_id)
    yield from (f"trial {row.number} has no ask" for row in rows if row.id not in with_ask)


def _ends(connection: Connection, study_id: int, rows: Rows) -> Iterator[str]:
    """Yields unknown states, ends that are missing or premature, and reports with a fence that was never assigned."""
    newest = verify_queries.newest_fences(connection, study_id)
    for row in rows:
        at = f"trial {row.number}"
        if newest.get(row.id, 0) > row.fence:
            yield f"{at} has a report of fence {newest[row.id]}, above its own {row.fence}"
        if row.state not in OPEN_STATES + TERMINAL_STATES:
            yield f"{at} is in no known state: {row.state!r}"
        elif (row.state in TERMINAL_STATES) != (row.ended_at is not None):
            yield f"{at} is {row.state}, and its end is {row.ended_at}"


def _attempts(connection: Connection, study: StudyRow, rows: Rows, alive: bool, report: Report) -> Iterator[str]:
    """Yields broken rules of attempts.

    A terminal trial has no open attempt. A running one has a single open attempt, that of its fence, whose worker
    lives.
    """
    by_trial = verify_queries.attempts_by_trial(connection, study.id)
    resumes = command(f"resume --study {study.name}")
    for trial in rows:
        at, attempts = f"trial {trial.number}", by_trial.get(trial.id, [])
        report.counts["attempts"] += len(attempts)
        running = [row for row in attempts if row.outcome is None]
        right = [row for row in running if trial.state == "running" and row.fence == trial.fence]
        for row in running:
            if row not in right:
                yield f"{at} is {trial.state}, but its attempt {row.fence} has not ended"
        if trial.state == "running" and not right:
            yield f"{at} is running without an attempt"
        # A living driver takes such a trial back; without a driver it waits for `hpo resume`.
        if not alive and any(is_dead(row.host, row.pid, row.pid_started) for row in right):
            yield f"{at} is running, but its worker is dead: `{resumes}` takes it up again"


def _leases(connection: Connection, study: StudyRow, report: Report) -> Iterator[str]:
    for name in (f"driver:{study.id}", *leases_of(study)):
        lease, kind = leases.holder(connection, name), name.partition(":")[0]
        if lease is None:
            continue
        report.counts["leases"] += 1
        if is_dead(lease.host, lease.pid, lease.pid_started):
            freed_by = command(f"{_FREED_BY[kind]} --study {study.name}")
            yield (
                f"the {kind}'s lease is held by a dead process, pid {lease.pid} on {lease.host}: `{freed_by}` frees it"
            )


def _removals(connection: Connection, study: StudyRow) -> Iterator[str]:
    """Yields removed trials whose files and runs are not all gone."""
    for number in sorted(removed.numbers(connection, study.id) - removed.numbers(connection, study.id, removed.FREED)):
        removes = command(f"rm {number} --study {study.name}")
        yield f"the removal of trial {number} was cut short: `{removes}` finishes it"


def _tells(rows: Rows) -> Iterator[str]:
    """Yields tells of trials that have not ended, and gaps in the order of tells."""
    by_position = {row.told: row for row in rows if row.told is not None}
    for row in by_position.values():
        if row.state not in TERMINAL_STATES:
            yield f"trial {row.number} is {row.state}, but the sampler was told of its end"
    if sorted(by_position) != list(range(len(by_position))):
        yield f"the places of the tells are not 0 to {len(by_position) - 1}: {sorted(by_position)}"


def _complete(connection: Connection, study: StudyRow, rows: Rows) -> Iterator[str]:
    """Yields trials that are not ended and told, and a missing number of trials, in a study that has ended.

    A complete study may have fewer trials than requested if no configuration was left to try.
    """
    if study.state == "open":
        return
    for row in rows:
        if row.state in ("waiting", "paused") and study.state == "stopped":
            continue  # failures ended the study; a resume continues it
        if row.state == "paused" and study.spec.order == "ordered" and promoting(study.spec.strategy):
            continue  # it waits for more trials
        if row.state not in TERMINAL_STATES:
            yield f"trial {row.number} is {row.state}, but the study is {study.state}"
        elif row.told is None:
            yield f"trial {row.number} was never told to the sampler, but the study is {study.state}"
    count = sum(row.outcome != "lost" for row in rows)
    short = study.state == "complete" and count < study.requested and study.max_epochs is None
    early = short and driver_queries.nothing_left(connection, study.id, len(rows))
    if short and not early and not goal_of(connection, study).reached:
        yield f"the study is complete with {counted(count, 'trial')}, and {study.requested} were requested"


def _values(study: StudyRow, rows: Rows) -> Iterator[str]:
    """Yields values that do not fit the state.

    A complete trial has a finite value per objective and breaks no constraint; a failed one has no values.
    """
    objectives = study.spec.objectives
    for row in rows:
        values, at = row.values, f"trial {row.number}"
        if row.state == "failed" and values:
            yield f"{at} has failed, but has the values {values}"
        if row.state != "complete":
            continue
        if len(values or ()) != len(objectives) or not all(
            value is not None and math.isfinite(value) for value in values or ()
        ):
            yield f"{at} is complete, and its values are {values} for {counted(len(objectives), 'objective')}"
        if (worst := max(row.violations or (), default=0.0)) > 0:
            yield f"{at} is complete, but breaks a constraint by {worst}"


def _decisions(connection: Connection, study_id: int, rows: Rows) -> Iterator[str]:
    """Yields decisions without the report they answer, and pruned trials without a decision to stop them."""
    number = {row.id: row.number for row in rows}
    for trial_id, step in verify_queries.unreported_decisions(connection, study_id):
        yield f"trial {number[trial_id]} has a decision at step {step}, but no report there"
    stopped = verify_queries.stopped(connection, study_id)
    for row in rows:
        if row.state == "pruned" and row.id not in stopped:
            yield f"trial {row.number} is pruned, but no decision stopped or paused it"


def _descent(rows: Rows) -> Iterator[str]:
    """Yields trials that begin from a checkpoint of a later or running trial, or of the wrong generation."""
    for row in rows:
        if row.start is None:
            continue
        at, number = f"trial {row.number}", int(row.start.partition("/")[0])
        parent = rows[number] if number < row.number else None
        if parent is None or row.parent is None:
            yield f"{at} begins from {row.start}, which is of no trial before it"
        elif parent.state not in TERMINAL_STATES:
            yield f"{at} begins from trial {number}, which is {parent.state}"
        elif row.generation <= parent.generation:
            yield f"{at} is of generation {row.generation}, and begins from one of generation {parent.generation}"


def _best(connection: Connection, study_id: int) -> Iterator[str]:
    """Yields wrong best flags: each is on a kept checkpoint, and on the best one once the trial has ended."""
    for judged in verify_queries.judged_checkpoints(connection, study_id).values():
        at = f"trial {judged[0].number}"
        flagged = [row for row in judged if row.best and row.state == "kept"]
        if len(flagged) > 1:
            yield f"{at} has {len(flagged)} best checkpoints: {', '.join(row.path for row in flagged)}"
        elif judged[0].trial_state in ("complete", "pruned"):
            yield from (f"{at}: {text}" for text in _right_best(judged, flagged))


def _right_best(found: Sequence[ConfiguredCheckpoint], flagged: Sequence[ConfiguredCheckpoint]) -> Iterator[str]:
    """Yields a difference if the flagged checkpoint is not the trial's best."""
    keep = monitored(found[0].config)
    if keep is None:
        return
    best, marked = best_of(found), [row.path for row in flagged]
    if marked != ([best] if best else []):
        yield f"by {keep['monitor']} the best checkpoint is {best or 'none'}, not {(marked or ['none'])[0]}"
