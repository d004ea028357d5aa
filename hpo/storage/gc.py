"""`hpo gc`: frees what ended trials hold on the disk and nobody needs.

All checkpoints of a trial go, or none. The rows are marked first, in one transaction that is the driver's alone to
make; then the files go, then metrics.json says what is left, then the mirror takes MLflow's names away. Whatever a kill
leaves undone, the next `hpo gc` finishes.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from hpo.clock import SystemClock
from hpo.declaration.study import RESUME_FROM
from hpo.ledger import Ledger, alert_queries, file_queries, leases, queries, removal, transactions
from hpo.ledger.process_id import Process
from hpo.ledger.rows import Connection, RowMapping
from hpo.search.population.base import breeding
from hpo.space.trial_state import TERMINAL_STATES
from hpo.storage import locations, metrics_json
from hpo.storage.home import Home
from hpo.text import counted, megabytes
from trainer.checkpoint.store import CheckpointStore
from trainer.files.durable import write_text
from trainer.runtime.failpoint import failpoint

LEASE_TIMEOUT = 30.0  # seconds that a driver on another host may be silent

Rows = Sequence[Mapping[str, Any]]
Sizes = dict[int, int]  # id of a checkpoint's row -> bytes, of trials that have ended


@dataclass(frozen=True)
class Plan:
    """Rows of checkpoints: `dropped`, trial by trial, and the others that are kept. `size` is what each takes on the
    disk besides those of its trial after it, which may share files with it."""

    dropped: Rows
    left: Rows

    def facts(self) -> dict[str, Any]:
        """Trial, step and bytes of each checkpoint, those that are dropped and those that are left."""
        columns = {"trial": "number", "step": "step", "bytes": "size"}
        some = {"dropped": self.dropped, "left": self.left}
        return {what: [{to: row[of] for to, of in columns.items()} for row in rows] for what, rows in some.items()}

    def describe(self, done: bool) -> str:
        verb = "freed" if done else "would free"
        return f"{verb} {_amount(self.dropped)}; {_amount(self.left)} stay."


def collect(
    ledger: Ledger, home: Home, name: str, keep_best: int = 1, max_bytes: int | None = None, *, dry_run: bool = False
) -> Plan:
    """Drop the checkpoints of ended trials but for the `keep_best` best, of several objectives at least the front; with
    `max_bytes`, only until the study's take no more than that, the worst trials first.

    Those that a restart, `train.resume_from` of a study of this ledger or the next generation of a population starts
    from stay with their trial. Raises Busy while the study has a driver.
    """
    row = ledger.look(lambda connection: queries.study_row(connection, name))
    if dry_run:
        return ledger.look(lambda connection: plan(connection, home, row, keep_best, max_bytes))
    if home.root.is_dir():  # the rows would say that files are gone which cannot be removed
        home.create()
    lease = leases.acquire(ledger, f"driver:{row['id']}", row["name"], Process.current(), SystemClock(), LEASE_TIMEOUT)
    try:
        planned = ledger.look(lambda connection: plan(connection, home, row, keep_best, max_bytes))
        return _free(ledger, home, row, lease, planned, whole=True)
    finally:
        lease.release()


def keep_within(
    ledger: Ledger, home: Home, name: str, lease: leases.Lease, max_bytes: int, sizes: Sizes, *, finish: bool
) -> None:
    """Under a driver's own lease: drop older checkpoints of ended trials, the worst trials first, until the study's
    take no more than `max_bytes`. The last of each trial stays, and all that `collect` leaves.

    With `finish`, what a kill has left undone is finished, also where nothing is to go. Without, nothing on the disk is
    looked at while the rows say that all of it fits, since a driver asks this at each end of a trial. `sizes` is kept
    between calls.
    """
    row = ledger.look(lambda connection: queries.study_row(connection, name))
    if finish or ledger.look(lambda connection: alert_queries.kept_bytes(connection, row["id"])) > max_bytes:
        planned = ledger.look(lambda connection: plan(connection, home, row, 1, max_bytes, sizes, spare_last=True))
        _free(ledger, home, row, lease, planned, whole=finish)


def _free(ledger: Ledger, home: Home, row: RowMapping, lease: leases.Lease, planned: Plan, *, whole: bool) -> Plan:
    """Mark what is to go and remove its files, and of the `whole` study what an earlier call left undone; what has
    gone, and what stays."""
    uid = uuid.uuid4().hex
    needed = ledger.transact(lambda connection: _mark(connection, lease, row, planned.dropped, uid))
    failpoint("retention.after_row")
    _tidy(ledger, home, row, None if whole else {one["number"] for one in planned.dropped})
    spared = [one for one in planned.dropped if one["number"] in needed]
    return Plan([one for one in planned.dropped if one["number"] not in needed], [*planned.left, *spared])


def plan(
    connection: Connection,
    home: Home,
    study: RowMapping,
    keep_best: int,
    max_bytes: int | None,
    sizes: Sizes | None = None,
    *,
    spare_last: bool = False,
) -> Plan:
    """What would go now."""
    kept = _measured(home, study, file_queries.kept_of_study(connection, study["id"]), {} if sizes is None else sizes)
    order = queries.ranked(connection, study)
    best = {one.number for one in queries.bests(connection, study)} | set(order[:keep_best])
    protected = best | _started_from(connection, home, study, kept) | _to_breed(connection, study)
    ended = [
        row for row in kept if row["trial_state"] in TERMINAL_STATES and row["number"] not in protected
    ]  # an open trial's checkpoints are its own affair
    total = sum(row["size"] for row in kept)
    gone: set[int] = set()  # ids of rows
    positions = {number: position for position, number in enumerate(order)}
    for _, rows in sorted(
        _by_trial(ended), key=lambda one: (positions.get(one[0], len(positions)), one[0]), reverse=True
    ):
        if max_bytes is not None and total <= max_bytes:
            break
        going = rows[:-1] if spare_last else rows
        total -= sum(row["size"] for row in going)
        gone |= {row["id"] for row in going}
    return Plan([row for row in kept if row["id"] in gone], [row for row in kept if row["id"] not in gone])


def _measured(home: Home, study: RowMapping, rows: Iterable[RowMapping], sizes: Sizes) -> list[dict[str, Any]]:
    """The rows with the bytes that their files add to what the disk holds: those that several share are the last's,
    since older ones go first. What is known of a trial that has ended stays so."""
    seen: set[Any] = set()
    measured, place = list[dict[str, Any]](), locations.place(home, study)
    for row in reversed(list(rows)):
        if (size := sizes.get(row["id"])) is None:
            files = place.sizes(home.checkpoints(study["name"], row["number"]) / row["path"], row["size"])
            size = sum(size for file, size in files.items() if file not in seen)
            seen |= files.keys()
            if row["trial_state"] in TERMINAL_STATES:
                sizes[row["id"]] = size
        measured.append({**row, "size": size})
    return measured[::-1]


def _by_trial(rows: Rows) -> Iterator[tuple[int, list[Mapping[str, Any]]]]:
    return ((number, list(own)) for number, own in groupby(rows, itemgetter("number")))


def _started_from(connection: Connection, home: Home, study: RowMapping, kept: Rows) -> set[int]:
    """The numbers of trials from whose checkpoints others are to start."""
    sources = {f"{row['number']}/{row['path']}": row["number"] for row in kept}
    needed = {sources[one] for one in file_queries.needed(connection, study["id"], list(sources))}
    # A home may be reached by several names: a directory is known by the one that has no link in it.
    named = {Path(place).resolve() for place in removal.begun_from(connection, None, RESUME_FROM)}
    return needed | {
        row["number"]
        for row in kept
        if named and (home.checkpoints(study["name"], row["number"]) / row["path"]).resolve() in named
    }


def _to_breed(connection: Connection, study: RowMapping) -> set[int]:
    """The numbers of trials of a population from which its next trials may go on: the last two generations'."""
    if study["state"] != "open" or not breeding(study["spec"]["strategy"]):
        return set()
    return file_queries.newest_generations(connection, study["id"])


def _mark(connection: Connection, lease: leases.Lease, study: RowMapping, rows: Rows, uid: str) -> set[int]:
    """Mark the rows as deleted; the numbers of trials that are needed by now, whose rows stay as they are."""
    lease.check(connection)
    needed: set[int] = set()
    for number, own in _by_trial(rows):
        paths = [row["path"] for row in own]
        if not file_queries.drop(connection, study["id"], number, own[0]["trial_id"], paths):
            needed.add(number)
    if dropped := [row for row in rows if row["number"] not in needed]:
        fields = {"trials": sorted({row["number"] for row in dropped}), "bytes": sum(row["size"] for row in dropped)}
        transactions.note(connection, study["id"], "checkpoints_dropped", fields, uid)
    return needed


def _tidy(ledger: Ledger, home: Home, study: RowMapping, numbers: set[int] | None) -> None:
    """Bring the files of the trials of these numbers, else of all that have ended, to what the rows say."""

    def look(connection: Connection) -> tuple[Sequence[RowMapping], dict[int, list[str]], dict[int, str]]:
        rows = [
            row for row in file_queries.ended(connection, study["id"]) if numbers is None or row["number"] in numbers
        ]
        paths = file_queries.kept_paths(connection, study["id"])
        return rows, paths, metrics_json.texts(connection, study, rows)

    rows, paths, texts = ledger.look(look)
    place = locations.place(home, study)
    for row in rows:
        directory = home.checkpoints(study["name"], row["number"])
        CheckpointStore(directory, fence=row["fence"], place=place).sweep(paths.get(row["id"], ()))
        failpoint("retention.after_files")
        file, text = metrics_json.path(home, study["name"], row["number"]), texts[row["number"]]
        if file.is_file() and file.read_text() != text:
            write_text(file, text)


def _amount(rows: Rows) -> str:
    """`1.2 MB (3 checkpoints of 1 trial)`."""
    size, trial_count = sum(row["size"] for row in rows), len({row["number"] for row in rows})
    return f"{megabytes(size)} ({counted(len(rows), 'checkpoint')} of {counted(trial_count, 'trial')})"
