"""The ledger against its own rules: numbers, ends, attempts, leases, tells, decisions, best flags."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from hpo.ledger import Ledger, driver_queries, leases, queries, verify_queries
from hpo.ledger.process_id import is_dead
from hpo.ledger.rows import Connection, RowMapping
from hpo.space.trial_state import OPEN_STATES, TERMINAL_STATES
from hpo.text import command, counted
from hpo.tracking.trackers import leases_of
from hpo.verify.report import Report

Rows = Sequence[RowMapping]
_FREED_BY = {"driver": "resume", "mirror": "sync", "alerts": "resume"}  # by the first part of a lease's name


def integrity(connection: Connection) -> list[str]:
    """What SQLite itself finds wrong with the file."""
    broken = [f"ledger: {line}" for line in verify_queries.integrity_check(connection)]
    lost = verify_queries.foreign_key_check(connection)
    return broken + [f"ledger: a row of {table} points to no row of {parent}" for table, parent in lost]


def check(ledger: Ledger, study: RowMapping, report: Report) -> bool:
    """Whether the trials' rows are such that more can be said of them; the rest of what is wrong is only reported."""
    name = study["name"]
    report.counts["studies"] += 1

    def body(connection: Connection) -> tuple[list[str], list[str]]:
        study_id: int = study["id"]
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
            )
        )
        return broken, [*_leases(connection, study, report), *rest]

    broken, rest = ledger.look(body)
    report.differences += [f"{name}: {text}" for text in (*broken, *rest)]
    return not broken


def _numbers(rows: Rows) -> Iterator[str]:
    numbers = [row["number"] for row in rows]
    if numbers != list(range(len(numbers))):
        yield f"the trials' numbers are not 0 to {len(numbers) - 1}: {numbers}"


def _asks(connection: Connection, study_id: int, rows: Rows) -> Iterator[str]:
    asked = verify_queries.asked(connection, study_id)
    yield from (f"trial {row['number']} has no ask" for row in rows if row["id"] not in asked)


def _ends(connection: Connection, study_id: int, rows: Rows) -> Iterator[str]:
    """States are known, ends stand where they must, no report is of a fence that was never given out."""
    newest = verify_queries.newest_fences(connection, study_id)
    for row in rows:
        at = f"trial {row['number']}"
        if newest.get(row["id"], 0) > row["fence"]:
            yield f"{at} has a report of fence {newest[row['id']]}, above its own {row['fence']}"
        if row["state"] not in OPEN_STATES + TERMINAL_STATES:
            yield f"{at} is in no known state: {row['state']!r}"
        elif (row["state"] in TERMINAL_STATES) != (row["ended_at"] is not None):
            yield f"{at} is {row['state']}, and its end is {row['ended_at']}"


def _attempts(connection: Connection, study: RowMapping, rows: Rows, alive: bool, report: Report) -> Iterator[str]:
    """A terminal trial has no open attempt, an open one at most the one of its fence, held by a worker that lives."""
    found = verify_queries.attempts_by_trial(connection, study["id"])
    again = command(f"resume --study {study['name']}")
    for trial in rows:
        at, own = f"trial {trial['number']}", found.get(trial["id"], [])
        report.counts["attempts"] += len(own)
        running = [row for row in own if row["outcome"] is None]
        right = [row for row in running if trial["state"] == "running" and row["fence"] == trial["fence"]]
        for row in running:
            if row not in right:
                yield f"{at} is {trial['state']}, but its attempt {row['fence']} has not ended"
        if trial["state"] == "running" and not right:
            yield f"{at} is running without an attempt"
        # While a driver lives it takes such a trial back; a dead study's waits for `hpo resume`.
        if not alive and any(is_dead(row["host"], row["pid"], row["pid_started"]) for row in right):
            yield f"{at} is running, but its worker is dead: `{again}` takes it up again"


def _leases(connection: Connection, study: RowMapping, report: Report) -> Iterator[str]:
    for name in (f"driver:{study['id']}", *leases_of(study)):
        lease, kind = leases.holder(connection, name), name.partition(":")[0]
        if lease is None:
            continue
        report.counts["leases"] += 1
        if is_dead(lease["host"], lease["pid"], lease["pid_started"]):
            words = "ui --optuna" if name.endswith(":optuna") else _FREED_BY[kind]
            freed_by = command(f"{words} --study {study['name']}")
            yield (
                f"the {kind}'s lease is held by a dead process, pid {lease['pid']} on {lease['host']}: "
                f"`{freed_by}` frees it"
            )


def _tells(rows: Rows) -> Iterator[str]:
    """Only what has ended is told, each once, and the places have no gap."""
    told = {row["told"]: row for row in rows if row["told"] is not None}
    for row in told.values():
        if row["state"] not in TERMINAL_STATES:
            yield f"trial {row['number']} is {row['state']}, but the sampler was told of its end"
    if sorted(told) != list(range(len(told))):
        yield f"the places of the tells are not 0 to {len(told) - 1}: {sorted(told)}"


def _complete(connection: Connection, study: RowMapping, rows: Rows) -> Iterator[str]:
    """A study that was brought to its end has as many trials as were asked for, unless nothing was left to be tried,
    all of them ended and told."""
    if study["state"] == "open":
        return
    for row in rows:
        if row["state"] in ("waiting", "paused") and study["state"] == "stopped":
            continue  # failures ended the study; a resume lets it go on
        if row["state"] not in TERMINAL_STATES:
            yield f"trial {row['number']} is {row['state']}, but the study is {study['state']}"
        elif row["told"] is None:
            yield f"trial {row['number']} was never told to the sampler, but the study is {study['state']}"
    count = sum(row["outcome"] != "lost" for row in rows)
    short = study["state"] == "complete" and count < study["requested"] and study["max_epochs"] is None
    if short and not driver_queries.nothing_left(connection, study["id"], len(rows)):
        yield f"the study is complete with {counted(count, 'trial')}, and {study['requested']} were requested"


def _values(study: RowMapping, rows: Rows) -> Iterator[str]:
    """What is complete has a finite value for each objective, and breaks no constraint; what failed has none."""
    objectives = study["spec"]["objectives"]
    for row in rows:
        values, at = row["values"], f"trial {row['number']}"
        if row["state"] == "failed" and values:
            yield f"{at} has failed, but has the values {values}"
        if row["state"] != "complete":
            continue
        if len(values or ()) != len(objectives) or not all(one is not None and math.isfinite(one) for one in values):
            yield f"{at} is complete, and its values are {values} for {counted(len(objectives), 'objective')}"
        if any(violation > 0 for violation in row["violations"] or ()):
            yield f"{at} is complete, but breaks a constraint by {max(row['violations'])}"


def _decisions(connection: Connection, study_id: int, rows: Rows) -> Iterator[str]:
    """Each decision has the report that it answers; what was pruned has the decision to stop it."""
    number = {row["id"]: row["number"] for row in rows}
    for trial_id, step in verify_queries.unreported_decisions(connection, study_id):
        yield f"trial {number[trial_id]} has a decision at step {step}, but no report there"
    stopped = verify_queries.stopped(connection, study_id)
    for row in rows:
        if row["state"] == "pruned" and row["id"] not in stopped:
            yield f"trial {row['number']} is pruned, but no decision stopped or paused it"


def _descent(rows: Rows) -> Iterator[str]:
    """What begins from another trial's checkpoint is of the generation after it, and begins once that one has ended."""
    for row in rows:
        if row["start"] is None:
            continue
        at, number = f"trial {row['number']}", int(row["start"].partition("/")[0])
        parent = rows[number] if number < row["number"] else None
        if parent is None or row["parent"] is None:
            yield f"{at} begins from {row['start']}, which is of no trial before it"
        elif parent["state"] not in TERMINAL_STATES:
            yield f"{at} begins from trial {number}, which is {parent['state']}"
        elif row["generation"] <= parent["generation"]:
            yield f"{at} is of generation {row['generation']}, and begins from one of generation {parent['generation']}"


def _best(connection: Connection, study_id: int) -> Iterator[str]:
    """The flag of the best checkpoint stands on one that is kept, and on the right one once the trial has ended."""
    for found in verify_queries.judged_checkpoints(connection, study_id).values():
        at = f"trial {found[0]['number']}"
        flagged = [row for row in found if row["best"] and row["state"] == "kept"]
        if len(flagged) > 1:
            yield f"{at} has {len(flagged)} best checkpoints: {', '.join(row['path'] for row in flagged)}"
        elif found[0]["trial_state"] in ("complete", "pruned"):
            yield from (f"{at}: {text}" for text in _right_best(found, flagged))


def _right_best(found: Rows, flagged: Rows) -> Iterator[str]:
    """Of checkpoints at one step the newest counts, of equal values the earlier step, of values the finite ones."""
    train = found[0]["config"].get("train")
    keep = train.get("checkpoint", {}) if isinstance(train, dict) else {}
    if keep.get("monitor") is None:
        return
    sign = 1.0 if keep["mode"] == "min" else -1.0
    values: dict[int, tuple[float, str]] = {}
    for row in found:
        value = float(row["metrics"].get(keep["monitor"], "nan"))
        if row["state"] == "kept" and math.isfinite(value):
            values[row["step"]] = (sign * value, row["path"])
    ranked = sorted((value, step, path) for step, (value, path) in values.items())
    best = [path for _, _, path in ranked[:1]]
    marked = [row["path"] for row in flagged]
    if marked != best:
        yield f"by {keep['monitor']} the best checkpoint is {(best or ['none'])[0]}, not {(marked or ['none'])[0]}"
