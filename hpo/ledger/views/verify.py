"""Queries for the verifier: SQLite's findings about its file, and the rows of a study to check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import and_, func, select

from hpo.ledger.database.tables import asks, attempts, checkpoints, decisions, events, reports, trials, workers
from hpo.ledger.read import by_trial, every
from hpo.ledger.rows import AttemptRow, CheckpointRow, ConfiguredCheckpoint, Connection, TrialRow

# Only SQLite


def integrity_check(connection: Connection) -> list[str]:
    """Returns SQLite's findings about the file, in its words."""
    return [line for (line,) in connection.exec_driver_sql("PRAGMA integrity_check") if line != "ok"]


def foreign_key_check(connection: Connection) -> list[tuple[str, str]]:
    """Returns the table of each row with a dangling reference, and the table that it refers to."""
    return [(row[0], row[2]) for row in connection.exec_driver_sql("PRAGMA foreign_key_check")]


# A study's trials


def trial_rows(connection: Connection, study_id: int) -> Sequence[TrialRow]:
    """Returns every trial in number order, including those without an ask."""
    query = select(trials).where(trials.c.study_id == study_id).order_by(trials.c.number)
    return every(TrialRow, connection.execute(query))


def asked(connection: Connection, study_id: int) -> set[int]:
    """Returns the ids of the trials that have an ask."""
    trial_ids = select(asks.c.trial_id).join(trials).where(trials.c.study_id == study_id)
    return set(connection.execute(trial_ids).scalars())


def attempts_by_trial(
    connection: Connection, study_id: int, numbers: Sequence[int] = ()
) -> dict[int, list[AttemptRow]]:
    """Returns trial id -> its attempts, each with the worker's process; of the trials of these numbers, or of all."""
    query = (
        select(attempts, workers.c.host, workers.c.pid, workers.c.pid_started)
        .join(trials, trials.c.id == attempts.c.trial_id)
        .join(workers, workers.c.id == attempts.c.worker_id)
        .where(trials.c.study_id == study_id, *([trials.c.number.in_(numbers)] if numbers else ()))
    )
    return by_trial(every(AttemptRow, connection.execute(query)))


# Reports and decisions


def count_reports(connection: Connection, study_id: int) -> int:
    """Returns how many values the study's trials have reported."""
    of_study = trials.c.study_id == study_id
    return connection.execute(select(func.count()).select_from(reports.join(trials)).where(of_study)).scalar_one()


def newest_fences(connection: Connection, study_id: int) -> dict[int, int]:
    """Returns trial id -> the highest fence of its reports, if it has any."""
    highest = func.max(reports.c.fence).label("fence")
    query = select(reports.c.trial_id, highest).join(trials).where(trials.c.study_id == study_id)
    return {row.trial_id: row.fence for row in connection.execute(query.group_by(reports.c.trial_id))}


def unreported_decisions(connection: Connection, study_id: int) -> list[tuple[int, int]]:
    """Returns (trial id, step) of the decisions that answer no report."""
    same = and_(*(reports.c[name] == decisions.c[name] for name in ("trial_id", "step", "fold")))
    answered = select(reports.c.step).where(same).exists()
    query = select(decisions.c.trial_id, decisions.c.step).join(trials).where(trials.c.study_id == study_id, ~answered)
    return [(row.trial_id, row.step) for row in connection.execute(query)]


def stopped(connection: Connection, study_id: int) -> set[int]:
    """Returns the ids of the trials that a decision has stopped or paused."""
    verdict = decisions.c.verdict.in_(("stop", "pause"))
    query = select(decisions.c.trial_id).join(trials).where(trials.c.study_id == study_id, verdict)
    return set(connection.execute(query).scalars())


# Files


def checkpoints_by_trial(connection: Connection, study_id: int) -> dict[int, list[CheckpointRow]]:
    """Returns trial id -> its checkpoints, including dropped or damaged ones."""
    query = select(checkpoints).join(trials).where(trials.c.study_id == study_id)
    return by_trial(every(CheckpointRow, connection.execute(query)))


def judged_checkpoints(connection: Connection, study_id: int) -> dict[int, list[ConfiguredCheckpoint]]:
    """Returns trial id -> its checkpoints by step, with the trial's `number`, `config`, and state as `trial_state`."""
    query = (
        select(checkpoints, trials.c.number, trials.c.state.label("trial_state"), asks.c.config)
        .join(trials, trials.c.id == checkpoints.c.trial_id)
        .join(asks, asks.c.trial_id == trials.c.id)
        .where(trials.c.study_id == study_id)
        .order_by(trials.c.number, checkpoints.c.step, checkpoints.c.id)
    )
    return by_trial(every(ConfiguredCheckpoint, connection.execute(query)))


def artifacts_by_trial(connection: Connection, study_id: int) -> dict[int, list[Mapping[str, Any]]]:
    """Returns trial id -> the fields of its artifact events, in their order."""
    is_artifact = (trials.c.study_id == study_id) & (events.c.kind == "artifact")
    query = select(events.c.trial_id, events.c.fields).join(trials).where(is_artifact).order_by(events.c.id)
    artifacts: dict[int, list[Mapping[str, Any]]] = {}
    for trial_id, fields in connection.execute(query):
        artifacts.setdefault(trial_id, []).append(fields)
    return artifacts
