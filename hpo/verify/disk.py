"""A home's files against the ledger, and what a killed process has left lying."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpo.ledger import Ledger, driver_queries, file_queries, leases, queries, verify_queries
from hpo.ledger.process_id import is_dead
from hpo.ledger.rows import Connection, RowMapping
from hpo.space.trial_state import OPEN_STATES, TERMINAL_STATES
from hpo.storage import locations, metrics_json
from hpo.storage.artifacts import shown, stored
from hpo.storage.home import WHOLE, Home
from hpo.text import command
from hpo.tracking.mlflow_store import leftovers
from hpo.verify.report import Report
from trainer.checkpoint.location import DISK, Disk
from trainer.checkpoint.manifest import Damaged
from trainer.checkpoint.manifest import check as check_manifest


@dataclass(frozen=True)
class _Expected:
    """What the ledger says of a study's files; `moving` are the ids of trials whose files come and go just now."""

    rows: Sequence[RowMapping]
    moving: set[int]
    checkpoints: dict[int, list[RowMapping]]
    handed_over: dict[int, list[Mapping[str, Any]]]  # the fields of artifact events
    of_study: Sequence[Mapping[str, Any]]
    results: dict[int, str]
    driven: bool  # it is not at its end, or its driver is still at work, or died at it


def _expected(connection: Connection, study: RowMapping) -> _Expected:
    study_id: int = study["id"]
    rows = verify_queries.trial_rows(connection, study_id)
    moving = _with_living_worker(connection, study_id)
    if queries.study_state(connection, study) == "running":
        moving |= {row["id"] for row in rows if row["state"] in OPEN_STATES}
    return _Expected(
        rows,
        moving,
        verify_queries.checkpoints_by_trial(connection, study_id),
        verify_queries.artifacts_by_trial(connection, study_id),
        file_queries.artifacts_of_study(connection, study_id),
        metrics_json.texts(connection, study, [row for row in rows if row["state"] in TERMINAL_STATES]),
        study["state"] == "open" or leases.holder(connection, f"driver:{study_id}") is not None,
    )


def check(ledger: Ledger, study: RowMapping, home: Home, report: Report) -> None:
    """The files of one study. What a worker that lives may be writing just now is left out."""
    said, place = ledger.look(lambda connection: _expected(connection, study)), locations.place(home, study)
    imported = study["spec"].get("imported") is not None  # of which no driver writes anything
    elsewhere, name = said.driven or imported or not locations.has_results(home, study), study["name"]
    for trial in said.rows:
        number, key = trial["number"], trial["id"]
        if key in said.moving:
            continue
        found = [
            *_checkpoints(place, home.checkpoints(name, number), said.checkpoints.get(key, []), trial, report, name),
            *_files(place, home.files(name, number), said.handed_over.get(key, []), report),
            *_results(metrics_json.path(home, name, number), said.results.get(number), elsewhere, name),
        ]
        report.differences += [f"{name}: trial {number}: {text}" for text in found]
    if locations.has_results(home, study):
        own = _files(DISK, home.files(study["name"], None), said.of_study, report)
        report.differences += [f"{study['name']}: {text}" for text in own]
    known = {f"{row['number']:05d}" for row in said.rows} | {"study.uid", WHOLE}
    for area in ("checkpoints", "files"):
        for entry in _entries(home.root / area / study["name"]):
            if entry.name not in known:
                report.differences.append(f"{study['name']}: {entry} belongs to no trial")


def _with_living_worker(connection: Connection, study_id: int) -> set[int]:
    """Running trials whose worker is not known to be dead."""
    rows = driver_queries.running(connection, study_id)
    return {row["id"] for row in rows if not is_dead(row["host"], row["pid"], row["pid_started"])}


def _checkpoints(
    place: Disk, root: Path, rows: Sequence[RowMapping], trial: RowMapping, report: Report, study: str
) -> Iterator[str]:
    expected = {metrics_json.NAME}
    for row in rows:
        if row["state"] == "kept":
            report.counts["checkpoints"] += 1
            expected.add(row["path"])
            try:
                with place.opened(root / row["path"], row["sha256"]) as directory:
                    check_manifest(directory, row["sha256"])
            except Damaged as damage:
                yield f"checkpoint {row['path']} is damaged: {damage}"
        elif row["state"] == "damaged":
            expected |= {row["path"], f"{row['path']}.corrupt"}
    for entry in place.entries(root):
        if entry.name not in expected:
            by = "resume" if trial["state"] not in TERMINAL_STATES else "gc" if entry.name.startswith("step-") else ""
            fix = f"`{command(f'{by} --study {study}')}` removes it" if by else "remove it"
            what = "left over by a killed process" if entry.name.endswith(".tmp") else "no checkpoint the ledger keeps"
            yield f"{place.shown(entry)} is {what}: {fix}"


def _files(place: Disk, root: Path, handed: Sequence[Mapping[str, Any]], report: Report) -> Iterator[str]:
    """What the task handed over is there, and nothing else but what a newer one of the name has replaced."""
    expected = set(shown(handed).values())
    found = place.files(root)
    report.counts["files"] += len(found)
    yield from (f"{place.shown(root / name)} is missing" for name in sorted(expected - found))
    for name in sorted(found - {stored(fields) for fields in handed}):
        what = "left over by a killed process" if name.endswith(".tmp") else "no artifact of any event"
        yield f"{place.shown(root / name)} is {what}: remove it"


def _results(path: Path, expected: str | None, elsewhere: bool, study: str) -> Iterator[str]:
    """metrics.json says what the ledger says; a driver that has left in good order has written it, to its home."""
    if not path.is_file():
        if expected is not None and not elsewhere:
            yield f"{path} is missing: `{command(f'resume --study {study}')}` writes it"
    elif expected is None:
        yield f"{path} says how the trial ended, and it has not"
    elif path.read_text(errors="replace") != expected:
        again = command(f"resume --study {study}")
        yield f"{path} does not say what the ledger does: remove it, and `{again}` writes it anew"


def check_leftovers(home: Home, studies: Sequence[str], report: Report) -> None:
    """What no study owns: probes and temporary files of dead processes, directories of unknown studies."""
    found: list[str] = []
    new = leftovers(home.root / "mlflow.db")
    for entry in _entries(home.root):
        if entry.name.endswith(".tmp") or entry in new:
            found.append(f"{entry} is left over by a killed process: remove it")
    for area in ("checkpoints", "files"):
        for entry in _entries(home.root / area):
            if entry.name not in studies:
                found.append(f"{entry} belongs to no study of this ledger")
    report.differences += [f"home: {text}" for text in found]


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []
