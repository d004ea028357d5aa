"""Makes a study's files agree with its rows after one of them is older: a restored ledger, or objects that are lost.

The rows decide. A kept checkpoint that is not there is recorded as deleted, so that its trial goes on from the one
before or from its start. Files that no row names are removed, and `metrics.json` is written anew. Files that a living
worker may be writing stay as they are. MLflow's runs are brought into line by the mirror (`hpo.tracking.runs_ahead`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpo.ledger import Ledger, removed
from hpo.ledger.checkpoints import best_of
from hpo.ledger.leases import Lease
from hpo.ledger.process_id import is_dead
from hpo.ledger.rows import CheckpointRow, Connection, StudyRow, TrialRow
from hpo.ledger.views import driver as driver_queries
from hpo.ledger.views import files as file_queries
from hpo.ledger.views import verify as verify_queries
from hpo.space.trial_state import TERMINAL_STATES
from hpo.storage import locations, metrics_json
from hpo.storage.artifacts import stored
from hpo.storage.home import Home
from trainer.checkpoint.location import Disk
from trainer.checkpoint.manifest import MANIFEST, Damaged
from trainer.checkpoint.manifest import check as check_manifest
from trainer.files.durable import write_text
from trainer.runtime.failpoint import failpoint

TRIAL = re.compile(r"\d{5,}")  # the directory of a trial
HANDED_OVER = re.compile(r"f\d+\.")  # the directory of what an attempt handed over


@dataclass(frozen=True)
class _Rows:
    """The ledger's rows about a study's files."""

    trials: Sequence[TrialRow]
    idle: Mapping[int, int]  # trial id -> fence, of the trials that no worker has, as far as is known
    checkpoints: Mapping[int, list[CheckpointRow]]
    handed_over: Mapping[int, set[str]]  # trial id -> the files of its artifact events


def reconcile(ledger: Ledger, home: Home, study: StudyRow, lease: Lease | None, *, thorough: bool = False) -> list[str]:
    """Makes the files agree with the rows, under the driver's lease; returns a sentence for each change.

    Without a lease it changes nothing and returns what it would do. With `thorough` it reads every kept checkpoint and
    every metrics.json; otherwise it only looks whether they are there, which is cheap enough for each resume. Raises
    UserError if the study's checkpoints are not seen from here, OSError or CheckpointError if files cannot be read or
    removed.
    """
    if ledger.look(lambda connection: driver_queries.any_saved(connection, study.id)):
        locations.check(home, study)  # or all of them would look lost
    location, before = locations.of(home, study), ledger.look(lambda connection: _idle(connection, study))
    checkpoints, files = home.checkpoints(study.name, 0).parent, home.files(study.name, 0).parent
    present, handed_over = (
        {name: set[str]() for name in _empty(root)} | _by_trial(location.files(root)) for root in (checkpoints, files)
    )
    # A joined worker may have claimed a trial meanwhile: only trials that were idle all the while are touched.
    rows = ledger.look(lambda connection: _rows(connection, study, before))
    lines, lost_paths = list[str](), dict[int, list[CheckpointRow]]()
    for trial in rows.trials:
        if trial.id not in rows.idle:
            continue
        kept = [row for row in rows.checkpoints.get(trial.id, []) if row.state == "kept"]
        there = present.get(f"{trial.number:05d}", set())
        root = home.checkpoints(study.name, trial.number)
        lost = [row for row in kept if f"{row.path}/{MANIFEST}" not in there]
        if thorough:
            lost += [row for row in kept if row not in lost and _damaged(location, root, row)]
        if lost and (lease is None or _drop(ledger, lease, study, trial, lost)):
            lines += [f"trial {trial.number}: checkpoint {row.path} is gone, so its row is dropped" for row in lost]
            lost_paths[trial.number] = lost
    failpoint("reconcile.after_rows")
    gone = {(number, row.path) for number, paths in lost_paths.items() for row in paths}
    for path, whole in _leftovers(rows, study, home, present, handed_over, gone):
        lines.append(f"{location.shown(path)} is known to no row, so it is removed")
        if lease is not None:
            (location.discard if whole else location.remove)(path)
    return lines + _results(ledger, home, study, rows, lease, None if thorough else set(lost_paths))


def _idle(connection: Connection, study: StudyRow) -> dict[int, int]:
    """Returns trial id -> fence of the trials without a worker that may live; removed trials are left out."""
    running = driver_queries.running(connection, study.id)
    busy = {row.id for row in running if not is_dead(row.host, row.pid, row.pid_started)}
    gone = removed.numbers(connection, study.id)
    rows = verify_queries.trial_rows(connection, study.id)
    return {row.id: row.fence for row in rows if row.id not in busy and row.number not in gone}


def _rows(connection: Connection, study: StudyRow, before: Mapping[int, int]) -> _Rows:
    now = _idle(connection, study)
    handed_over = verify_queries.artifacts_by_trial(connection, study.id)
    return _Rows(
        verify_queries.trial_rows(connection, study.id),
        dict(now.items() & before.items()),
        verify_queries.checkpoints_by_trial(connection, study.id),
        {trial_id: {stored(fields) for fields in all_fields} for trial_id, all_fields in handed_over.items()},
    )


def _by_trial(files: set[str]) -> dict[str, set[str]]:
    """Returns the first part of each path -> the rest of the paths that have it."""
    parts: defaultdict[str, set[str]] = defaultdict(set)
    for file in files:
        first, slash, rest = file.partition("/")
        if slash:
            parts[first].add(rest)
    return parts


def _empty(directory: Path) -> list[str]:
    """Returns the names of the directories without an entry, which no list of files names."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return [path.name for path in paths if path.is_dir() and not any(path.iterdir())]


def _damaged(location: Disk, root: Path, row: CheckpointRow) -> bool:
    try:
        with location.opened(root / row.path, row.sha256) as directory:
            check_manifest(directory, row.sha256)
    except Damaged:
        return True
    return False


def _drop(ledger: Ledger, lease: Lease, study: StudyRow, trial: TrialRow, lost: Sequence[CheckpointRow]) -> bool:
    """Records checkpoints as deleted and ranks the others again; returns False, changing nothing, if one is needed."""

    def body(connection: Connection) -> bool:
        paths = [row.path for row in lost]
        if not file_queries.drop(connection, study.id, trial.number, trial.id, paths, lost=True):
            return False
        left = verify_queries.judged_checkpoints(connection, study.id).get(trial.id, [])
        file_queries.rank_again(connection, trial.id, best_of(left))
        return True

    return lease.write(body)


def _leftovers(
    rows: _Rows,
    study: StudyRow,
    home: Home,
    checkpoints: Mapping[str, set[str]],
    files: Mapping[str, set[str]],
    gone: set[tuple[int, str]],
) -> Iterator[tuple[Path, bool]]:
    """Yields what no row names, below a study's checkpoints and files, and whether it is a whole directory.

    Only what hpo itself writes counts: a file that somebody has put there stays.
    """
    by_name = {f"{trial.number:05d}": trial for trial in rows.trials}
    for name, paths in sorted(checkpoints.items()):
        root = home.checkpoints(study.name, 0).parent / name
        trial = by_name.get(name)
        if trial is None:
            if TRIAL.fullmatch(name):
                yield root, True
        elif trial.id in rows.idle:
            known: set[str] = set()
            for row in rows.checkpoints.get(trial.id, []):
                if row.state == "kept" and (trial.number, row.path) not in gone:
                    known.add(row.path)
                elif row.state == "damaged":
                    known |= {row.path, f"{row.path}.corrupt"}
            directories = {path.partition("/")[0]: "/" in path for path in paths}
            ours = {entry: whole for entry, whole in directories.items() if entry.startswith("step-")}
            yield from ((root / entry, whole) for entry, whole in sorted(ours.items()) if entry not in known)
    for name, paths in sorted(files.items()):
        root = home.files(study.name, 0).parent / name
        trial = by_name.get(name)
        if trial is None:
            if TRIAL.fullmatch(name):
                yield root, True
        elif trial.id in rows.idle:
            ours = {path for path in paths if HANDED_OVER.match(path)}
            yield from ((root / path, False) for path in sorted(ours - rows.handed_over.get(trial.id, set())))


def _results(
    ledger: Ledger, home: Home, study: StudyRow, rows: _Rows, lease: Lease | None, numbers: set[int] | None
) -> list[str]:
    """Removes the metrics.json of trials that have not ended, and writes those anew that say something else.

    Only those of the trials with these `numbers` are read, by default all.
    """
    if study.spec.imported is not None:
        return []
    lines: list[str] = []
    shown = [trial for trial in rows.trials if trial.id in rows.idle]
    for trial in shown:
        path = metrics_json.path(home, study.name, trial.number)
        if trial.state not in TERMINAL_STATES and path.exists():
            lines.append(f"{path} says how the trial ended, and it has not, so it is removed")
            if lease is not None:
                path.unlink(missing_ok=True)
    read = [trial for trial in shown if trial.state in TERMINAL_STATES]
    read = [trial for trial in read if numbers is None or trial.number in numbers]
    for number, text in ledger.look(lambda connection: metrics_json.texts(connection, study, read)).items():
        path = metrics_json.path(home, study.name, number)
        if path.exists() and path.read_text(errors="replace") != text:
            lines.append(f"{path} does not say what the ledger does, so it is written anew")
            if lease is not None:
                write_text(path, text)
    return lines
