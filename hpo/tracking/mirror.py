"""Drains a study: sends what is new in the ledger to the tracker, batch by batch, then moves the cursor.

Whoever drains holds the tracker's lease on the study (`trackers.lease_of`), so one process at a time does. Killed
between a send and the commit of its cursor, the next one sends the same again, which changes nothing; a run that was
created but not yet recorded is found again by its tag.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpo.clock import Clock, SystemClock
from hpo.errors import DamagedLedger, StorageError
from hpo.ledger import Ledger, leases, mirror_queries, queries, removal
from hpo.ledger.mirror_queries import STUDY, Cursor
from hpo.ledger.process_id import Process
from hpo.ledger.rows import Connection, RowMapping
from hpo.storage.home import Home
from hpo.terminal import print
from hpo.text import command, counted
from hpo.tracking import curves, projection, run_files
from hpo.tracking.ahead import ahead
from hpo.tracking.base import Batch, Refused, Tracker, Unreachable
from hpo.tracking.trackers import called, lease_of
from trainer.runtime.failpoint import failpoint

POLL = 1.5  # seconds between looks: a person sees within two what has happened, and a look serves many reports
MAX_PAUSE = 30.0  # seconds between looks at a tracker that is away
LEASE_TIMEOUT = 60.0  # seconds; longer than one call to a tracker may hang
GRACE = 10.0  # seconds of trying once it is time to leave


@dataclass(frozen=True)
class DrainResult:
    """`sent` batches were taken by the tracker; it is `behind` by so many of the ledger's transactions, and why."""

    sent: int
    behind: int
    why: str = ""


def behind(ledger: Ledger, tracker_name: str, study: str) -> int:
    """How many of the ledger's transactions on a study the tracker has not got; from the cursors alone."""
    return ledger.look(lambda c: projection.behind(c, tracker_name, queries.study_row(c, study)))


def drain(
    ledger: Ledger, tracker: Tracker, study: str, home: Home, *, seconds: float = GRACE, clock: Clock | None = None
) -> DrainResult:
    """Send all there is, trying for up to `seconds`; raise Busy while another process mirrors the study."""
    study_id = ledger.look(lambda connection: queries.study_row(connection, study)["id"])
    clock = clock or SystemClock()
    name = lease_of(study_id, tracker.name)
    lease = leases.acquire(ledger, name, study, Process.current(), clock, LEASE_TIMEOUT)
    try:
        return Mirror(ledger, tracker, study, home, lease, clock).follow(lambda: True, seconds, clock.sleep)
    finally:
        lease.release()


class Mirror:
    """Sends one study to one tracker. Holds only what can be lost: what it sent last, to send less next time."""

    def __init__(
        self, ledger: Ledger, tracker: Tracker, study: str, home: Home, lease: leases.Lease, clock: Clock
    ) -> None:
        self._ledger, self._tracker, self._study, self._home = ledger, tracker, study, home
        self._lease, self._clock = lease, clock
        self._renewed = clock.monotonic()
        self._parent: str | None = None
        self._uid = ""  # of the study that `_parent` is the run of
        self._curves = 0  # the ends that its curves show
        self._unrecorded: dict[str, str] | None = None  # uid -> run id of runs that no cursor names
        self._shown: dict[str, tuple[dict[str, str], str | None]] = {}  # run id -> tags and status it shows
        self._described: dict[str, str] = {}  # the tags of what holds the runs
        self._refused: dict[int, tuple[int, str]] = {}  # number -> revision that was refused, and why
        self._without: dict[int, int] = {}  # number -> revision that was sent but for its files
        self._unfetched, self._fetch_at = "", -math.inf  # why not, and when it is tried again
        self.sent = 0

    def follow(self, leaving: Callable[[], bool], grace: float, wait: Callable[[float], Any]) -> DrainResult:
        """Look again and again; once `leaving`, until one look has sent all or `grace` seconds are over."""
        pause, why, deadline = POLL, "", math.inf
        while True:
            last = leaving()
            deadline = min(deadline, self._clock.monotonic() + grace) if last else deadline
            try:
                self._renew()
                self.look(leaving=last)
                if last and (not self._without or self._clock.monotonic() >= deadline):
                    left = [text for _, text in self._refused.values()] + [self._unfetched] * bool(self._without)
                    return self._result("; ".join(left))
                pause, why = POLL, ""
            except DamagedLedger:
                raise
            except (Unreachable, Refused, StorageError) as error:
                if self._clock.monotonic() >= deadline:
                    return self._result(str(error))
                if str(error) != why and not last:  # then the result says why
                    print(error, flush=True)
                pause, why = min(2 * pause, MAX_PAUSE), str(error)
            wait(min(pause, 1.0) if last else pause)

    def look(self, *, leaving: bool = False) -> None:
        """Send everything that is new now. Raises Unreachable; a trial that is refused is left out and remembered, as
        are files in a bucket that is away."""
        self._fetch_at = -math.inf if leaving else self._fetch_at
        study, cursor = self._ledger.look(self._study_and_cursor)
        if study["uid"] != self._uid:  # at first, and where all trials were set aside meanwhile
            self._parent, self._unrecorded, self._shown, self._described = None, None, {}, {}
            self._discard_what_is_ahead(study)
            self._uid = study["uid"]
        parent = self._open_study(study, cursor.run_id if cursor else None)
        changed = cursor is None or cursor.revision < study["revision"] or parent not in self._shown
        ended = self._send_all_trials(study, parent)
        if changed or ended or leaving:
            self._send_study(study, parent, leaving, whole=changed)

    def _study_and_cursor(self, connection: Connection) -> tuple[RowMapping, Cursor | None]:
        study = queries.study_row(connection, self._study)
        removal.check_whole(study)
        return study, mirror_queries.study_cursor(connection, self._tracker.name, study["id"])

    def _send_all_trials(self, study: RowMapping, parent: str) -> bool:
        """Send page after page of the trials that have something new; True if one of them has ended."""
        after, ended = -1, False
        while True:
            found = self._ledger.look(
                lambda c, after=after: projection.pending(c, self._tracker.name, study, self._home, after)
            )
            if not found:
                return ended
            after = found[-1].number
            ended = ended or any(trial.batch.ended_at is not None for trial in found)
            self._send_trials(study, parent, [p for p in found if self._refused.get(p.number, (0,))[0] < p.revision])

    def _discard_what_is_ahead(self, study: RowMapping) -> None:
        """Delete the runs that show what the ledger does not know, with their cursors: they are made anew."""
        views = self._tracker.find(self._study, study["uid"], children=True)
        found = self._ledger.look(lambda connection: ahead(connection, study, views))
        if not found:
            return
        numbers = sorted({*found.values()})
        print(
            f"{called(self._tracker.name)} is ahead of the ledger, which was taken back, in "
            f"{counted(len(numbers), 'trial')} ({', '.join(map(str, numbers))}): their runs are made anew.",
            flush=True,
        )
        where = (self._tracker.name, study["id"], numbers)
        self._lease.write(lambda connection: mirror_queries.forget(connection, *where))
        for run_id in found:
            self._tracker.discard(run_id)

    def _open_study(self, study: RowMapping, recorded: str | None) -> str:
        """The id of the study's run: recorded, found by its tag, or new."""
        if self._parent is None:
            self._discard_set_aside(study)
            tags = {view.run_id: view.tags for view in self._tracker.find(self._study, study["uid"])}
            found = [*tags]
            self._parent = recorded if recorded in found else next(iter(found), None)
            self._curves = curves.marked(tags.get(self._parent or "", {}))
            self._discard([run_id for run_id in found if run_id != self._parent])
            if self._parent is None:
                if recorded is not None:
                    print("the tracker has lost this study; all of it is sent again.", flush=True)
                    forget(self._ledger, self._tracker.name, self._study)
                self._parent = self._tracker.open_study(self._study, projection.study_run(study))
                failpoint("mirror.after_create_run")
            if self._parent != recorded:
                self._commit(study, [(STUDY, self._parent, -1)])
        return self._parent

    def _discard_set_aside(self, study: RowMapping) -> None:
        """Delete the runs of trials that a change of the declaration has replaced; they had no value."""
        _, *before = self._ledger.look(lambda connection: removal.uids(connection, study))
        for uid in before:
            trials = self._tracker.find(self._study, uid, children=True)
            for view in [*trials, *self._tracker.find(self._study, uid)]:
                self._tracker.discard(view.run_id)

    def _send_trials(self, study: RowMapping, parent: str, trials: Sequence[projection.Pending]) -> None:
        """Send each; commit the cursors of those sent, also when one of them fails."""
        cursors: list[tuple[int, str, int]] = []
        try:
            for trial in trials:
                fetched = self._fetched(trial)
                if not fetched and self._without.get(trial.number) == trial.revision:
                    continue
                try:
                    run_id = self._send_trial(study, parent, trial if fetched else _without_files(trial))
                except Refused as error:
                    self._refused[trial.number] = (trial.revision, f"trial {trial.number}: {error}")
                    print(f"trial {trial.number}: {error}", flush=True)
                    continue
                self._refused.pop(trial.number, None)
                if fetched:
                    self._without.pop(trial.number, None)
                    cursors.append((trial.number, run_id, trial.revision))
                else:  # its cursor stays: what is sent now is sent again, which changes nothing
                    self._without[trial.number] = trial.revision
                self._renew()
        finally:
            self._commit(study, cursors)

    def _fetched(self, trial: projection.Pending) -> bool:
        """Whether its files are on this host. Where a bucket does not give them, that is said once, and for the next
        half minute none is asked for: numbers do not wait for files."""
        if not self._tracker.keeps_files:
            return True
        if self._clock.monotonic() < self._fetch_at:
            return not trial.batch.files
        try:
            run_files.fetch(trial.place, trial.batch.files)
        except StorageError as error:
            if str(error) != self._unfetched:
                print(error, "All else is sent, and these once they can be.", flush=True)
            self._unfetched, self._fetch_at = str(error), self._clock.monotonic() + MAX_PAUSE
            return False
        self._unfetched = "" if trial.batch.files else self._unfetched
        return True

    def _send_trial(self, study: RowMapping, parent: str, trial: projection.Pending) -> str:
        run_id, batch = trial.run_id or self._recover(study, trial.run.uid), trial.batch
        if run_id is None:
            try:
                run_id = self._tracker.open_trial(parent, replace(trial.run, tags={**trial.run.tags, **batch.tags}))
            except Unreachable:
                self._unrecorded = None  # it may have been created all the same
                raise
            failpoint("mirror.after_create_run")
            if self._unrecorded is not None:
                self._unrecorded[trial.run.uid] = run_id  # it stands, even if what follows is refused
            self._shown[run_id] = (dict(batch.tags), "RUNNING")
        self._send(run_id, batch)
        if batch.ended_at is not None:
            del self._shown[run_id]
        failpoint("mirror.after_send")
        return run_id

    def _send(self, run_id: str, batch: Batch) -> None:
        """Send `batch` without the tags and the status that the run is known to show."""
        tags, status = self._shown.get(run_id, ({}, None))
        new = {key: value for key, value in batch.tags.items() if tags.get(key) != value}
        unchanged = batch.status == status and batch.ended_at is None
        self._tracker.send(run_id, replace(batch, tags=new, status=None if unchanged else batch.status))
        shown = {key: value for key, value in {**tags, **new}.items() if key not in batch.removed_tags}
        self._shown[run_id] = (shown, batch.status)
        self.sent += 1

    def _recover(self, study: RowMapping, uid: str) -> str | None:
        """The id of a run that was created before a crash or a lost answer, and never recorded."""
        if self._unrecorded is None:
            self._unrecorded = self._search(study)
        return self._unrecorded.get(uid)

    def _search(self, study: RowMapping) -> dict[str, str]:
        """uid -> run id of the runs that no cursor names; where two stand for one trial, the later is deleted."""
        where = (self._tracker.name, study["id"])
        cursors = self._ledger.look(lambda connection: mirror_queries.cursors(connection, *where))
        recorded = {f"{study['uid']}/{number}": cursor.run_id for number, cursor in cursors.items()}
        unrecorded: dict[str, str] = {}
        superfluous = []
        for view in self._tracker.find(self._study, study["uid"], children=True):
            standing = recorded.get(view.uid) or unrecorded.setdefault(view.uid, view.run_id)
            if standing != view.run_id:
                superfluous.append(view.run_id)
        self._discard(superfluous)
        return unrecorded

    def _discard(self, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            print(f"run {run_id} stands twice; it is deleted.", flush=True)
            self._tracker.discard(run_id)

    def _send_study(self, study: RowMapping, parent: str, leaving: bool, whole: bool) -> None:
        batch = self._ledger.look(lambda connection: self._study_batch(connection, study, leaving))
        if (tags := self._ledger.look(lambda c: projection.experiment_tags(c, study))) != self._described:
            self._tracker.describe(self._study, {k: v for k, v in tags.items() if self._described.get(k) != v})
            self._described = tags
        if whole or batch.points or self._shown.get(parent) != (batch.tags, batch.status):
            self._send(parent, batch if whole else replace(batch, texts={}, files={}, datasets=()))
            failpoint("mirror.after_study")
            self._curves = curves.marked(batch.tags)
        if whole:
            self._commit(study, [(STUDY, parent, study["revision"])])

    def _study_batch(self, connection: Connection, study: RowMapping, leaving: bool) -> Batch:
        state = queries.study_state(connection, study)
        if leaving and state == "running":
            state = "interrupted"  # nobody will be left to say so
        return projection.study_batch(connection, study, self._home, state, self._curves)

    def _commit(self, study: RowMapping, cursors: Sequence[tuple[int, str, int]]) -> None:
        """Record runs and how far they have come; raise Busy if another process mirrors the study by now."""
        if not cursors:
            return
        self._tracker.flush()
        where = (self._tracker.name, study["id"])
        self._lease.write(lambda connection: mirror_queries.move(connection, *where, cursors))
        failpoint("mirror.after_cursor")
        self._renewed = self._clock.monotonic()

    def _renew(self) -> None:
        if self._clock.monotonic() - self._renewed > LEASE_TIMEOUT / 6:
            self._lease.renew()
            self._renewed = self._clock.monotonic()

    def _result(self, why: str) -> DrainResult:
        return DrainResult(self.sent, behind(self._ledger, self._tracker.name, self._study), why)


def _without_files(trial: projection.Pending) -> projection.Pending:
    return replace(trial, batch=replace(trial.batch, files={}))


def forget(ledger: Ledger, tracker_name: str, study: str) -> None:
    """Drop the cursors of a study: the next drain finds its runs by their tags, or makes them, and sends all again."""

    def body(connection: Connection) -> None:
        mirror_queries.forget(connection, tracker_name, queries.study_row(connection, study)["id"])

    ledger.transact(body)


def lag(result: DrainResult, tracker_name: str) -> str:
    """What to tell the user about a drain; empty if nothing is missing."""
    if not result.behind:
        return ""
    why = f" ({result.why})" if result.why else ""
    behind = counted(result.behind, "transaction")
    if "is damaged" in result.why:  # by its own sentence, which says what to do
        return f"{called(tracker_name)} is behind by {behind}: {result.why}"
    return f"{called(tracker_name)} is behind by {behind}{why}: run `{command('sync')}`; nothing is lost."
