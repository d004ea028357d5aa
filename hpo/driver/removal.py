"""`hpo rm`: deletes a study from MLflow, from its files and from the ledger, in this order.

The study is marked first, in the ledger, and its row goes last: what a kill leaves undone, the next `hpo rm` finishes.
Every step may be done again. Both leases of the study are held meanwhile, so that nobody drives or mirrors it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpo.clock import Clock, SystemClock
from hpo.declaration.study import RESUME_FROM
from hpo.driver.reclaim import Reclaimer
from hpo.errors import Busy, UserError
from hpo.ledger import Ledger, queries, removal
from hpo.ledger.leases import Heartbeat, Lease, acquire
from hpo.ledger.process_id import Process
from hpo.ledger.rows import Connection, RowMapping
from hpo.storage import locations
from hpo.storage.gc import LEASE_TIMEOUT
from hpo.storage.home import Home
from hpo.storage.removal import remove_study
from hpo.text import counted, megabytes
from hpo.tracking.keeper import storage_file, tracker_of
from hpo.tracking.mirror import LEASE_TIMEOUT as MIRROR_TIMEOUT
from hpo.tracking.trackers import OPTUNA, called, leases_of, open_tracker
from hpo.tracking.uri import tracker_name, tracking_uri_of
from trainer.runtime.failpoint import failpoint


@dataclass(frozen=True)
class Contents:
    """What `hpo rm` deletes of a study."""

    name: str
    trials: int
    checkpoints: int
    size: int  # bytes of the checkpoints
    place: str  # where they lie
    runs: dict[str, int]  # tracker -> runs recorded there

    def describe(self, *, leave_mlflow: bool = False) -> str:
        kept = f"{counted(self.checkpoints, 'checkpoint')} ({megabytes(self.size)}) in {self.place}"
        runs = [f"{counted(count, 'run')} in {called(tracker)}" for tracker, count in self.runs.items()]
        gone = [counted(self.trials, "trial"), kept, *([] if leave_mlflow else runs)]
        left = f"; what stays: {', '.join(runs)}" if leave_mlflow and runs else ""
        return f"study {self.name}: {', '.join(gone)}{left}"


def contents(ledger: Ledger, home: Home, name: str) -> Contents:
    """What there is to be deleted; StudyError where there is no such study, UserError as `remove` has it where another
    one begins from it."""

    def look(connection: Connection) -> Contents:
        row = queries.study_row(connection, name)
        held, place = removal.contents(connection, row["id"]), locations.url(row) or str(home.root)
        known = removal.mirrored(connection, row["id"])
        runs = {tracker: known[tracker] for tracker in known if not _of_another_home(row, home, tracker)}
        return Contents(name, held["trials"], held["checkpoints"], held["bytes"], place, runs)

    _check_needed(ledger, home, ledger.look(lambda connection: queries.study_row(connection, name)))
    return ledger.look(look)


def remove(
    ledger: Ledger,
    home: Home,
    name: str,
    tracking_uri: str | None = None,
    *,
    leave_mlflow: bool = False,
    clock: Clock | None = None,
) -> None:
    """Delete the study. Raises Busy while it is driven, mirrored or trained; UserError where another study begins from
    one of its checkpoints, or where its checkpoints are not those of this home; Unreachable where MLflow is away,
    unless it is to `leave_mlflow` as it is."""
    clock = clock or SystemClock()
    row = ledger.look(lambda connection: queries.study_row(connection, name))
    with _leases(ledger, row, clock) as held:
        _wait_for_workers(ledger, row, clock)
        _check_needed(ledger, home, row)
        _check_place(ledger, home, row)
        if home.root.is_dir():  # a study would be half removed whose files cannot be
            home.create()

        def mark(connection: Connection) -> None:
            held[0].check(connection)
            removal.mark(connection, row["id"], str(home.root), Process.current())

        ledger.transact(mark)
        failpoint("removal.after_mark")
        if storage_file(home).exists():
            with closing(tracker_of(ledger, storage_file(home))) as shown:
                shown.remove(row["name"], row["uid"])
        if not leave_mlflow:
            _remove_from_trackers(ledger, home, row, tracking_uri)
        failpoint("removal.after_runs")
        remove_study(home, row)
        failpoint("removal.after_files")

        def erase(connection: Connection) -> None:
            for lease in held:
                lease.check(connection)
            removal.erase(connection, row["id"])

        ledger.transact(erase)


@contextmanager
def _leases(ledger: Ledger, row: RowMapping, clock: Clock) -> Iterator[list[Lease]]:
    """Be the study's driver, its mirrors and who sends its alerts; Busy where somebody else is."""
    me, held = Process.current(), list[Lease]()
    try:
        others = [(name, MIRROR_TIMEOUT) for name in leases_of(row)]
        for name, timeout in [(f"driver:{row['id']}", LEASE_TIMEOUT), *others]:
            held.append(acquire(ledger, name, row["name"], me, clock, timeout))
        with Heartbeat(f"study {row['name']}", lambda: _renew(held), LEASE_TIMEOUT / 3):
            yield held
    finally:
        for lease in held:
            lease.release()


def _renew(held: Sequence[Lease]) -> None:
    for lease in held:
        lease.renew()


def _wait_for_workers(ledger: Ledger, row: RowMapping, clock: Clock) -> None:
    """Take trials back from workers that are dead or silent; Busy where one of them lives. What it would still write
    could otherwise be taken for that of a later study."""
    timeout = row["lease_seconds"]
    reclaimer, deadline = Reclaimer(ledger, row["id"], clock, timeout), clock.monotonic() + 1.5 * timeout
    while True:
        reclaimer.reclaim(counted=False)
        going = ledger.look(lambda connection: removal.running(connection, row["id"]))
        if not going:
            return
        one = going[0]
        if one["host"] == Process.current().host or clock.monotonic() > deadline:
            raise Busy(
                f"trial {one['number']} of study {row['name']!r} is being trained by host {one['host']}, pid "
                f"{one['pid']}: wait for it or stop it."
            )
        clock.sleep(min(1.0, timeout / 10))


def _check_needed(ledger: Ledger, home: Home, row: RowMapping) -> None:
    """A home may be reached by several names: a directory is known by the one that has no link in it."""
    found = ledger.look(lambda connection: removal.begun_from(connection, row["id"], RESUME_FROM))
    place = Path(locations.place(home, row).shown(home.checkpoints(row["name"], 0).parent)).resolve()
    for path, other in found.items():
        if Path(path).resolve().is_relative_to(place):
            raise UserError(
                f"study {other!r} begins from a checkpoint of study {row['name']!r}, {path}: remove that study first."
            )


def _check_place(ledger: Ledger, home: Home, row: RowMapping) -> None:
    """Refuse another home than that of the checkpoints: they would stay, and nothing would know of them any more."""
    again = row["environment"].get("removed_from") == [Process.current().host, str(home.root)]
    if not again and ledger.look(lambda connection: removal.contents(connection, row["id"]))["checkpoints"]:
        locations.check(home, row)


def _remove_from_trackers(ledger: Ledger, home: Home, row: RowMapping, tracking_uri: str | None) -> None:
    """From where the study is tracked, and from wherever else it ever was."""
    uri = tracking_uri_of(ledger, row["name"], home, tracking_uri)
    uids, known = ledger.look(lambda c: (removal.uids(c, row), removal.mirrored(c, row["id"])))
    known = {name: runs for name, runs in known.items() if not name.startswith(OPTUNA)}
    others = [name for name in known if name != tracker_name(uri) and not _of_another_home(row, home, name)]
    for one in [uri, *others]:
        if one.startswith("sqlite") and not Path(one.partition(":///")[2]).exists():
            continue  # with all that it held
        tracker = open_tracker(one, home.artifacts, create=False)
        try:
            for uid in uids:
                tracker.remove(row["name"], uid)
        finally:
            tracker.close()


def _of_another_home(row: RowMapping, home: Home, tracker: str) -> bool:
    """Whether a tracker is the store inside the home that this one was copied or moved from: its runs stay."""
    begun = Home(Path(row["environment"]["home"]))
    return begun != home and tracker == tracker_name(begun.tracking_uri)
