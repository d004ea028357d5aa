"""Frees disk space that ended trials no longer need, for `hpo gc`.

All checkpoints of a trial go, or none. The rows are marked first, in one transaction that only the driver may make;
then the files go, then metrics.json is updated, then the mirror removes MLflow's names. The next `hpo gc` finishes what
a kill leaves undone.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from hpo.clock import SystemClock
from hpo.declaration.study import RESUME_FROM
from hpo.ledger import Ledger, answer, leases, queries, removal, transactions
from hpo.ledger.process_id import Process
from hpo.ledger.rows import Connection, StudyRow, TrialCheckpoint, TrialRow
from hpo.ledger.views import alerts as alert_queries
from hpo.ledger.views import files as file_queries
from hpo.search.population.base import breeding
from hpo.space.trial_state import TERMINAL_STATES
from hpo.storage import locations, metrics_json
from hpo.storage.home import Home
from hpo.text import counted, megabytes
from trainer.checkpoint.store import CheckpointStore
from trainer.files.durable import write_text
from trainer.runtime.failpoint import failpoint

LEASE_TIMEOUT = 30.0  # seconds of silence allowed to a driver on another host

Rows = Sequence[TrialCheckpoint]
Sizes = dict[int, int]  # id of a checkpoint's row -> bytes, for ended trials


@dataclass(frozen=True)
class Plan:
    """Rows of checkpoints: those `dropped`, trial by trial, and those `left`.

    A row's `size` is the disk space that it takes in addition to later checkpoints of its trial, which may share files.
    """

    dropped: Rows
    left: Rows

    def facts(self) -> dict[str, Any]:
        """Returns trial, step and bytes of each checkpoint, dropped and left."""
        rows_of = {"dropped": self.dropped, "left": self.left}
        return {
            kind: [{"trial": row.number, "step": row.step, "bytes": row.size} for row in rows]
            for kind, rows in rows_of.items()
        }

    def describe(self, done: bool) -> str:
        verb = "freed" if done else "would free"
        return f"{verb} {_amount(self.dropped)}; {_amount(self.left)} stay."


def collect(
    ledger: Ledger, home: Home, name: str, keep_best: int = 1, max_bytes: int | None = None, *, dry_run: bool = False
) -> Plan:
    """Drops the checkpoints of ended trials except the `keep_best` best, with several objectives at least the front.

    With `max_bytes`, drops only until the study takes no more than that, the worst trials first. Trials keep
    checkpoints from which a restart, `train.resume_from` of a study in this ledger or a population's next generation
    starts. Raises Busy while the study has a driver.
    """
    row = ledger.look(lambda connection: queries.study_row(connection, name))
    if dry_run:
        return ledger.look(lambda connection: plan(connection, home, row, keep_best, max_bytes))
    if home.root.is_dir():  # otherwise rows would record files as gone that cannot be removed
        home.create()
    lease = leases.acquire(ledger, f"driver:{row.id}", row.name, Process.current(), SystemClock(), LEASE_TIMEOUT)
    try:
        planned = ledger.look(lambda connection: plan(connection, home, row, keep_best, max_bytes))
        return _free(ledger, home, row, lease, planned, whole=True)
    finally:
        lease.release()


def keep_within(
    ledger: Ledger, home: Home, name: str, lease: leases.Lease, max_bytes: int, sizes: Sizes, *, finish: bool
) -> None:
    """Drops older checkpoints of ended trials, the worst trials first, until the study takes no more than `max_bytes`.

    Needs a driver's own lease. Each trial's last checkpoint stays, and so does all that `collect` keeps. With `finish`,
    finishes what a kill has left undone, even if nothing is to be dropped. Otherwise it does not read the disk while
    the rows show that everything fits, since a driver calls this after each trial. `sizes` is kept between calls.
    """
    row = ledger.look(lambda connection: queries.study_row(connection, name))
    if finish or ledger.look(lambda connection: alert_queries.kept_bytes(connection, row.id)) > max_bytes:
        planned = ledger.look(lambda connection: plan(connection, home, row, 1, max_bytes, sizes, spare_last=True))
        _free(ledger, home, row, lease, planned, whole=finish)


def _free(ledger: Ledger, home: Home, row: StudyRow, lease: leases.Lease, planned: Plan, *, whole: bool) -> Plan:
    """Marks the planned rows and removes their files; of the `whole` study also what an earlier call left undone.

    Returns what was dropped and what stays.
    """
    uid = uuid.uuid4().hex
    needed = ledger.transact(lambda connection: _mark(connection, lease, row, planned.dropped, uid))
    failpoint("retention.after_row")
    _tidy(ledger, home, row, None if whole else {checkpoint.number for checkpoint in planned.dropped})
    spared = [checkpoint for checkpoint in planned.dropped if checkpoint.number in needed]
    return Plan(
        [checkpoint for checkpoint in planned.dropped if checkpoint.number not in needed], [*planned.left, *spared]
    )


def plan(
    connection: Connection,
    home: Home,
    study: StudyRow,
    keep_best: int,
    max_bytes: int | None,
    sizes: Sizes | None = None,
    *,
    spare_last: bool = False,
) -> Plan:
    """Returns what would be dropped now."""
    kept = _measured(home, study, file_queries.kept_of_study(connection, study.id), {} if sizes is None else sizes)
    order = queries.ranked(connection, study)
    best = {trial.number for trial in answer.bests(connection, study)} | set(order[:keep_best])
    protected = best | _started_from(connection, home, study, kept) | _to_breed(connection, study)
    ended_rows = [
        row for row in kept if row.trial_state in TERMINAL_STATES and row.number not in protected
    ]  # an open trial manages its own checkpoints
    total = sum(row.size for row in kept)
    dropped_ids: set[int] = set()  # ids of rows
    positions = {number: position for position, number in enumerate(order)}
    for _, rows in sorted(
        _by_trial(ended_rows), key=lambda trial: (positions.get(trial[0], len(positions)), trial[0]), reverse=True
    ):
        if max_bytes is not None and total <= max_bytes:
            break
        going = rows[:-1] if spare_last else rows
        total -= sum(row.size for row in going)
        dropped_ids |= {row.id for row in going}
    return Plan([row for row in kept if row.id in dropped_ids], [row for row in kept if row.id not in dropped_ids])


def _measured(home: Home, study: StudyRow, rows: Iterable[TrialCheckpoint], sizes: Sizes) -> list[TrialCheckpoint]:
    """Returns the rows with the bytes that their files add on the disk.

    Files shared by several checkpoints count for the last one, since older ones go first. Sizes of ended trials are
    kept.
    """
    seen: set[Any] = set()
    measured, location = list[TrialCheckpoint](), locations.of(home, study)
    for row in reversed(list(rows)):
        if (size := sizes.get(row.id)) is None:
            files = location.sizes(home.checkpoints(study.name, row.number) / row.path, row.size)
            size = sum(size for file, size in files.items() if file not in seen)
            seen |= files.keys()
            if row.trial_state in TERMINAL_STATES:
                sizes[row.id] = size
        measured.append(replace(row, size=size))
    return measured[::-1]


def _by_trial(rows: Rows) -> Iterator[tuple[int, list[TrialCheckpoint]]]:
    return ((number, list(trial_rows)) for number, trial_rows in groupby(rows, attrgetter("number")))


def _started_from(connection: Connection, home: Home, study: StudyRow, kept: Rows) -> set[int]:
    """Returns the numbers of trials from whose checkpoints other trials will start."""
    sources = {f"{row.number}/{row.path}": row.number for row in kept}
    needed = {sources[source] for source in file_queries.needed(connection, study.id, list(sources))}
    # A home may have several names: compare directories by their resolved paths.
    named = {Path(path).resolve() for path in removal.begun_from(connection, None, RESUME_FROM)}
    return needed | {
        row.number for row in kept if named and (home.checkpoints(study.name, row.number) / row.path).resolve() in named
    }


def _to_breed(connection: Connection, study: StudyRow) -> set[int]:
    """Returns the numbers of a population's trials from which its next trials may start: the last two generations."""
    if study.state != "open" or not breeding(study.spec.strategy):
        return set()
    return file_queries.newest_generations(connection, study.id)


def _mark(connection: Connection, lease: leases.Lease, study: StudyRow, rows: Rows, uid: str) -> set[int]:
    """Marks the rows as deleted; returns the numbers of trials that are needed meanwhile, whose rows stay unchanged."""
    lease.check(connection)
    needed: set[int] = set()
    for number, trial_rows in _by_trial(rows):
        paths = [row.path for row in trial_rows]
        if not file_queries.drop(connection, study.id, number, trial_rows[0].trial_id, paths):
            needed.add(number)
    if dropped := [row for row in rows if row.number not in needed]:
        fields = {"trials": sorted({row.number for row in dropped}), "bytes": sum(row.size for row in dropped)}
        transactions.note(connection, study.id, "checkpoints_dropped", fields, uid)
    return needed


def _tidy(ledger: Ledger, home: Home, study: StudyRow, numbers: set[int] | None) -> None:
    """Brings the files of the trials with these numbers, by default of all ended trials, in line with the rows."""

    def look(connection: Connection) -> tuple[Sequence[TrialRow], dict[int, list[str]], dict[int, str]]:
        rows = [row for row in file_queries.ended(connection, study.id) if numbers is None or row.number in numbers]
        paths = file_queries.kept_paths(connection, study.id)
        return rows, paths, metrics_json.texts(connection, study, rows)

    rows, paths, texts = ledger.look(look)
    location = locations.of(home, study)
    for row in rows:
        directory = home.checkpoints(study.name, row.number)
        CheckpointStore(directory, fence=row.fence, location=location).sweep(paths.get(row.id, ()))
        failpoint("retention.after_files")
        file, text = metrics_json.path(home, study.name, row.number), texts[row.number]
        if file.is_file() and file.read_text() != text:
            write_text(file, text)


def _amount(rows: Rows) -> str:
    """Returns, for example, `1.2 MB (3 checkpoints of 1 trial)`."""
    size, trial_count = sum(row.size for row in rows), len({row.number for row in rows})
    return f"{megabytes(size)} ({counted(len(rows), 'checkpoint')} of {counted(trial_count, 'trial')})"
