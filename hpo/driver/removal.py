"""`hpo rm`: deletes a study from MLflow, from its files and from the ledger, in this order.

Single trials are removed by `hpo/driver/trial_removal.py`.
The study is first marked in the ledger, and its row is deleted last, so the next `hpo rm` finishes after a kill.
Every step may be repeated. The study's leases are held throughout, so that no process drives or mirrors it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hpo.clock import Clock, SystemClock
from hpo.declaration.study import RESUME_FROM
from hpo.door import option
from hpo.driver.reclaim import Reclaimer
from hpo.errors import Busy, UserError
from hpo.ledger import Ledger, audit, queries, removal
from hpo.ledger.leases import Heartbeat, Lease, acquire
from hpo.ledger.process_id import Process
from hpo.ledger.rows import Connection, StudyRow
from hpo.ledger.views import driver as driver_queries
from hpo.ledger.views import mirror as mirror_queries
from hpo.storage import locations
from hpo.storage.gc import LEASE_TIMEOUT
from hpo.storage.home import Home
from hpo.storage.removal import remove_study
from hpo.text import command, counted, megabytes
from hpo.tracking.base import Deleted, Tracker, Unreachable
from hpo.tracking.mirror import LEASE_TIMEOUT as MIRROR_TIMEOUT
from hpo.tracking.trackers import OPTUNA, called, leases_of, open_tracker
from hpo.tracking.uri import tracker_name, tracking_uri_of
from trainer.runtime.failpoint import failpoint


@dataclass(frozen=True)
class Contents:
    """The contents of a study that `hpo rm` deletes."""

    name: str
    trials: int
    checkpoints: int
    size: int  # bytes of the checkpoints
    place: str  # the directory or bucket that holds them
    runs: dict[str, int]  # tracker -> runs recorded there
    derived: list[str]  # the studies derived from it, which stay

    def staying(self) -> str:
        """Returns a sentence that names the derived studies, which stay, and the commands that delete them.

        The text is empty if there are none.
        """
        if not self.derived:
            return ""
        deletes = " and ".join(f"`{command(f'rm --study {name}')}`" for name in self.derived)
        is_single = len(self.derived) == 1
        stays, it = ("stays", "it") if is_single else ("stay", "them")
        return f"{', '.join(self.derived)}, derived from it, {stays}: {deletes} would delete {it}."

    def describe(self, *, leave_mlflow: bool = False) -> str:
        kept = f"{counted(self.checkpoints, 'checkpoint')} ({megabytes(self.size)}) in {self.place}"
        runs = [f"{counted(count, 'run')} in {called(tracker)}" for tracker, count in self.runs.items()]
        deleted = [counted(self.trials, "trial"), kept, *([] if leave_mlflow else runs)]
        left = f"; what stays: {', '.join(runs)}" if leave_mlflow and runs else ""
        return f"study {self.name}: {', '.join(deleted)}{left}"


def contents(ledger: Ledger, home: Home, name: str) -> Contents:
    """Returns the contents of a study.

    Raises StudyError if the study does not exist, and UserError if another study begins from its checkpoints.
    """

    def look(connection: Connection) -> Contents:
        row = queries.study_row(connection, name)
        totals, location = removal.contents(connection, row.id), locations.url(row) or str(home.root)
        known = removal.mirrored(connection, row.id)
        runs = {tracker: known[tracker] for tracker in known if not _of_another_home(row, home, tracker)}
        derived = _derived(connection, name)
        return Contents(name, totals["trials"], totals["checkpoints"], totals["bytes"], location, runs, derived)

    check_needed(ledger, home, ledger.look(lambda connection: queries.study_row(connection, name)))
    return ledger.look(look)


def _derived(connection: Connection, name: str) -> list[str]:
    """Returns the studies derived from a study, directly or through other derived studies."""
    family = [name]
    for study, source in queries.derived(connection).items():  # in the order in which they began
        if source in family:
            family.append(study)
    return family[1:]


def remove(
    ledger: Ledger,
    home: Home,
    name: str,
    tracking_uri: str | None = None,
    *,
    leave_mlflow: bool = False,
    clock: Clock | None = None,
) -> None:
    """Deletes the study.

    Raises Busy while it is driven, mirrored or trained, UserError if another study begins from one of its
    checkpoints or where its checkpoints lie in another home, and Unreachable if MLflow does not answer, unless
    `leave_mlflow` is set.
    """
    clock = clock or SystemClock()
    row = ledger.look(lambda connection: queries.study_row(connection, name))
    with holding(ledger, row, clock) as leases:
        _wait_for_workers(ledger, row, clock)
        check_needed(ledger, home, row)
        check_home(ledger, home, row)
        if home.root.is_dir():  # else a study whose files cannot be deleted would be half removed
            home.create()
        trackers = [] if leave_mlflow else tracked(ledger, home, row, tracking_uri)
        check_answering(ledger, home, row, trackers)

        entry = audit.Entry(name, "rm")

        def mark(connection: Connection) -> None:
            leases[0].check(connection)
            entry.write(connection)
            removal.mark(connection, row.id, str(home.root), Process.current())

        ledger.transact(mark)
        failpoint("removal.after_mark")
        uids = ledger.look(lambda connection: removal.uids(connection, row))
        remove_from_trackers(ledger, home, row, trackers, uids)
        failpoint("removal.after_runs")
        remove_study(home, row)
        failpoint("removal.after_files")

        def erase(connection: Connection) -> None:
            for lease in leases:
                lease.check(connection)
            removal.erase(connection, row.id)

        ledger.transact(erase)


@contextmanager
def holding(ledger: Ledger, row: StudyRow, clock: Clock) -> Generator[list[Lease], None, None]:
    """Holds the leases of the study's driver, mirrors and alert process. Raises Busy if another process holds one."""
    process, leases = Process.current(), list[Lease]()
    try:
        others = [(name, MIRROR_TIMEOUT) for name in leases_of(row)]
        for name, timeout in [(f"driver:{row.id}", LEASE_TIMEOUT), *others]:
            leases.append(acquire(ledger, name, row.name, process, clock, timeout))
        with Heartbeat(f"study {row.name}", lambda: _renew(leases), LEASE_TIMEOUT / 3):
            yield leases
    finally:
        for lease in leases:
            lease.release()


def _renew(leases: Sequence[Lease]) -> None:
    for lease in leases:
        lease.renew()


def _wait_for_workers(ledger: Ledger, row: StudyRow, clock: Clock) -> None:
    """Reclaims trials from dead or silent workers.

    Raises Busy if a worker is alive: its output could be taken for that of a later study.
    """
    timeout = row.lease_seconds
    reclaimer, deadline = Reclaimer(ledger, row.id, clock, timeout), clock.monotonic() + 1.5 * timeout
    while True:
        reclaimer.reclaim(counted=False)
        attempts = ledger.look(lambda connection: driver_queries.running(connection, row.id))
        if not attempts:
            return
        attempt = attempts[0]
        if attempt.host == Process.current().host or clock.monotonic() > deadline:
            raise Busy(
                f"trial {attempt.number} of study {row.name!r} is being trained by host {attempt.host}, pid "
                f"{attempt.pid}: wait for it or stop it."
            )
        clock.sleep(min(1.0, timeout / 10))


def check_needed(ledger: Ledger, home: Home, row: StudyRow, number: int | None = None) -> None:
    """Raises UserError if another study begins from a checkpoint of the study, or of its trial `number`.

    Symbolic links are resolved, since a home may be reached by several paths.
    """
    begun = ledger.look(lambda connection: removal.begun_from(connection, row.id, RESUME_FROM))
    of_trial = home.checkpoints(row.name, number or 0)
    directory = Path(locations.of(home, row).shown(of_trial.parent if number is None else of_trial)).resolve()
    for path, other in begun.items():
        if Path(path).resolve().is_relative_to(directory):
            raise UserError(
                f"study {other!r} begins from a checkpoint of study {row.name!r}, {path}: remove that study first."
            )


def check_home(ledger: Ledger, home: Home, row: StudyRow) -> None:
    """Refuses a home that does not hold the checkpoints: they would stay without a record."""
    is_begun = row.environment.get("removed_from") == [Process.current().host, str(home.root)]
    if not is_begun and ledger.look(lambda connection: removal.contents(connection, row.id))["checkpoints"]:
        locations.check(home, row)


def tracked(ledger: Ledger, home: Home, row: StudyRow, tracking_uri: str | None) -> list[str]:
    """Returns the URIs under which the study is or ever was tracked, without SQLite files that no longer exist."""
    uri = tracking_uri_of(ledger, row.name, home, tracking_uri)
    known = [name for name in ledger.look(lambda c: removal.mirrored(c, row.id)) if not name.startswith(OPTUNA)]
    others = [name for name in known if name != tracker_name(uri) and not _of_another_home(row, home, name)]
    uris = (uri, *others)
    return [uri for uri in uris if not uri.startswith("sqlite") or Path(uri.partition(":///")[2]).exists()]


def _opened(ledger: Ledger, home: Home, row: StudyRow, trackers: Sequence[str]) -> Iterator[Tracker]:
    for uri in trackers:
        opened = open_tracker(uri, home.artifacts, create=False, reference=row.spec.reference)
        with closing(opened) as tracker:
            cursor = ledger.look(lambda c, name=tracker.name: mirror_queries.study_cursor(c, name, row.id))
            if cursor is not None:
                with suppress(Deleted):  # a study that was deleted there is removed all the same
                    tracker.recall(row.name, cursor.run_id)
            yield tracker


def remove_from_trackers(
    ledger: Ledger, home: Home, row: StudyRow, trackers: Sequence[str], uids: Sequence[str]
) -> None:
    """Removes the study's runs that are recorded under `uids`."""
    for tracker in _opened(ledger, home, row, trackers):
        for uid in uids:
            tracker.remove(row.name, uid)


def check_answering(ledger: Ledger, home: Home, row: StudyRow, trackers: Sequence[str]) -> None:
    """Raises Unreachable, before anything is deleted, if a tracker does not answer."""
    try:
        for tracker in _opened(ledger, home, row, trackers):
            tracker.find(row.name, row.uid)
    except Unreachable as error:
        raise Unreachable(
            f"{str(error).rstrip('.')}: nothing is deleted; try again once it answers, or leave the runs there by "
            f"{option('leave_mlflow')}."
        ) from error


def _of_another_home(row: StudyRow, home: Home, tracker: str) -> bool:
    """Returns whether a tracker lies in the home that this one was copied or moved from; its runs stay."""
    original = Home(Path(row.environment["home"]))
    return original != home and tracker == tracker_name(original.tracking_uri)
