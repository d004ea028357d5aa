"""Compares a home's files with the ledger, and finds the leftovers of killed processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpo.ledger import Ledger, leases, queries, removed
from hpo.ledger.process_id import is_dead
from hpo.ledger.rows import CheckpointRow, Connection, StudyRow, TrialRow
from hpo.ledger.views import driver as driver_queries
from hpo.ledger.views import files as file_queries
from hpo.ledger.views import verify as verify_queries
from hpo.space.trial_state import OPEN_STATES, TERMINAL_STATES
from hpo.storage import locations, metrics_json
from hpo.storage.artifacts import shown, stored
from hpo.storage.home import WHOLE, Home
from hpo.storage.reconcile import HANDED_OVER, TRIAL
from hpo.text import command
from hpo.tracking.mlflow.store import leftovers
from hpo.verify.report import Report
from trainer.checkpoint.location import DISK, Disk
from trainer.checkpoint.manifest import Damaged
from trainer.checkpoint.manifest import check as check_manifest


@dataclass(frozen=True)
class _Expected:
    """Holds the files of a study that the ledger expects; `moving` are ids of trials whose files are changing now."""

    rows: Sequence[TrialRow]
    moving: set[int]
    checkpoints: dict[int, list[CheckpointRow]]
    handed_over: dict[int, list[Mapping[str, Any]]]  # the fields of artifact events
    of_study: Sequence[Mapping[str, Any]]
    results: dict[int, str]
    driven: bool  # the study is open, or its driver works or died before it released its lease


def _expected(connection: Connection, study: StudyRow) -> _Expected:
    study_id: int = study.id
    rows = verify_queries.trial_rows(connection, study_id)
    moving = _with_living_worker(connection, study_id)
    if queries.study_state(connection, study) == "running":
        moving |= {row.id for row in rows if row.state in OPEN_STATES}
    removed_numbers = removed.numbers(connection, study_id)
    removed_ids = {row.id for row in rows if row.number in removed_numbers}
    results = [row for row in rows if row.state in TERMINAL_STATES and row.id not in removed_ids]
    handed_over = verify_queries.artifacts_by_trial(connection, study_id)
    return _Expected(
        rows,
        moving,
        verify_queries.checkpoints_by_trial(connection, study_id),
        {key: fields for key, fields in handed_over.items() if key not in removed_ids},
        file_queries.artifacts_of_study(connection, study_id),
        metrics_json.texts(connection, study, results),
        study.state == "open" or leases.holder(connection, f"driver:{study_id}") is not None,
    )


def check(ledger: Ledger, study: StudyRow, home: Home, report: Report) -> None:
    """Checks the files of one study, except those that a living worker may be writing."""
    expected, location = ledger.look(lambda connection: _expected(connection, study)), locations.of(home, study)
    imported = study.spec.imported is not None  # no driver writes files of such a study
    elsewhere, name = expected.driven or imported or not locations.has_results(home, study), study.name
    for trial in expected.rows:
        number, key = trial.number, trial.id
        if key in expected.moving:
            continue
        differences = [
            *_checkpoints(
                location, home.checkpoints(name, number), expected.checkpoints.get(key, []), trial, report, name
            ),
            *_files(location, home.files(name, number), expected.handed_over.get(key, []), report, name),
            *_results(metrics_json.path(home, name, number), expected.results.get(number), elsewhere, name),
        ]
        report.differences += [f"{name}: trial {number}: {text}" for text in differences]
    if locations.has_results(home, study):
        study_files = _files(DISK, home.files(study.name, None), expected.of_study, report, study.name)
        report.differences += [f"{study.name}: {text}" for text in study_files]
    known = {f"{row.number:05d}" for row in expected.rows} | {"study.uid", WHOLE}
    for area in ("checkpoints", "files"):
        for entry in _entries(home.root / area / study.name):
            if entry.name not in known:
                repairs = f"`{command(f'repair --study {study.name}')}` removes it"
                fix = repairs if TRIAL.fullmatch(entry.name) else "move it elsewhere"
                report.differences.append(f"{study.name}: {entry} belongs to no trial: {fix}")


def _with_living_worker(connection: Connection, study_id: int) -> set[int]:
    """Returns the ids of running trials whose worker is not known to be dead."""
    rows = driver_queries.running(connection, study_id)
    return {row.id for row in rows if not is_dead(row.host, row.pid, row.pid_started)}


def _checkpoints(
    location: Disk, root: Path, rows: Sequence[CheckpointRow], trial: TrialRow, report: Report, study: str
) -> Iterator[str]:
    expected = {metrics_json.NAME}
    for row in rows:
        if row.state == "kept":
            report.counts["checkpoints"] += 1
            expected.add(row.path)
            try:
                with location.opened(root / row.path, row.sha256) as directory:
                    check_manifest(directory, row.sha256)
            except Damaged as damage:
                yield f"checkpoint {row.path} is damaged: {damage}"
        elif row.state == "damaged":
            expected |= {row.path, f"{row.path}.corrupt"}
    for entry in location.entries(root):
        if entry.name not in expected:
            unfinished = entry.name.endswith(".tmp")
            by = "repair" if not unfinished else "gc" if trial.state in TERMINAL_STATES else "resume"
            ours = entry.name.startswith("step-")
            fix = f"`{command(f'{by} --study {study}')}` removes it" if ours else "move it elsewhere"
            kind = "left over by a killed process" if unfinished else "no checkpoint the ledger keeps"
            yield f"{location.shown(entry)} is {kind}: {fix}"


def _files(
    location: Disk, root: Path, handed: Sequence[Mapping[str, object]], report: Report, study: str
) -> Iterator[str]:
    """Yields differences between the files handed over and those present, except files that a newer one replaced."""
    expected = set(shown(handed).values())
    present = location.files(root)
    report.counts["files"] += len(present)
    yield from (f"{location.shown(root / name)} is missing" for name in sorted(expected - present))
    for name in sorted(present - {stored(fields) for fields in handed}):
        kind = "left over by a killed process" if name.endswith(".tmp") else "no artifact of any event"
        fix = f"`{command(f'repair --study {study}')}` removes it" if HANDED_OVER.match(name) else "move it elsewhere"
        yield f"{location.shown(root / name)} is {kind}: {fix}"


def _results(path: Path, expected: str | None, elsewhere: bool, study: str) -> Iterator[str]:
    """Yields a difference if metrics.json is not what the ledger implies.

    A driver that has left in good order has written the file, to its own home.
    """
    if not path.is_file():
        if expected is not None and not elsewhere:
            yield f"{path} is missing: `{command(f'resume --study {study}')}` writes it"
    elif expected is None:
        yield f"{path} says how the trial ended, and it has not: `{command(f'repair --study {study}')}` removes it"
    elif path.read_text(errors="replace") != expected:
        yield f"{path} does not say what the ledger does: `{command(f'repair --study {study}')}` writes it anew"


def check_leftovers(home: Home, studies: Sequence[str], report: Report) -> None:
    """Reports files that no study owns: probes and temporary files of dead processes, directories of unknown
    studies."""
    leftover_texts: list[str] = []
    new = leftovers(home.root / "mlflow.db")
    for entry in _entries(home.root):
        if entry.name.endswith(".tmp") or entry in new:
            leftover_texts.append(f"{entry} is left over by a killed process: remove it")
    for area in ("checkpoints", "files"):
        for entry in _entries(home.root / area):
            if entry.name not in studies:
                leftover_texts.append(f"{entry} belongs to no study of this ledger")
    report.differences += [f"home: {text}" for text in leftover_texts]


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []
