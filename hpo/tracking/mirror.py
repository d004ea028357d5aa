"""Drains a study: sends what is new in the ledger to the tracker, batch by batch, then moves the cursor.

The draining process holds the tracker's lease on the study (`trackers.lease_of`), so only one drains at a time. After a
kill between a send and the commit of its cursor, the next process sends the same data again, which changes nothing; a
run that was created but not recorded is found by its tag.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hpo.clock import Backoff, Clock, SystemClock
from hpo.errors import DamagedLedger, StorageError
from hpo.ledger import Ledger, leases, queries, removal
from hpo.ledger.process_id import Process
from hpo.ledger.rows import Connection, StudyRow
from hpo.ledger.views import mirror as mirror_queries
from hpo.ledger.views.mirror import LEFT, STUDY, Cursor
from hpo.storage.home import Home
from hpo.terminal import print
from hpo.text import counted
from hpo.tracking import curves, projection, run_files
from hpo.tracking.base import Batch, Refused, Tracker, Unreachable
from hpo.tracking.lag import DrainResult, behind
from hpo.tracking.runs_ahead import ahead
from hpo.tracking.trackers import called, lease_of
from trainer.runtime.failpoint import failpoint

POLL = 1.5  # seconds between looks: changes show within two seconds, and one look serves many reports
MAX_PAUSE = 30.0  # seconds between looks at an unreachable tracker
LEASE_TIMEOUT = 60.0  # seconds; longer than one call to a tracker may take
GRACE = 10.0  # seconds to keep trying after being asked to leave


def drain(
    ledger: Ledger,
    tracker: Tracker,
    study: str,
    home: Home,
    *,
    seconds: float = GRACE,
    clock: Clock | None = None,
    repairing: Callable[[StudyRow, leases.Lease], Sequence[str]] = lambda row, lease: (),
) -> DrainResult:
    """Sends everything new after `repairing`, trying for up to `seconds`.

    Raises Busy if another process mirrors the study.
    """
    row = ledger.look(lambda connection: queries.study_row(connection, study))
    removal.check_whole(row)
    clock = clock or SystemClock()
    name = lease_of(row.id, tracker.name)
    lease = leases.acquire(ledger, name, study, Process.current(), clock, LEASE_TIMEOUT)
    try:
        changes = repairing(row, lease)
        drained = Mirror(ledger, tracker, study, home, lease, clock).follow(lambda: True, seconds, clock.sleep)
        return replace(drained, repaired=changes)
    finally:
        lease.release()


class Mirror:
    """Sends one study to one tracker.

    Its state can be lost safely: it only records what was sent, to send less next time.
    """

    def __init__(
        self, ledger: Ledger, tracker: Tracker, study: str, home: Home, lease: leases.Lease, clock: Clock
    ) -> None:
        self._ledger, self._tracker, self._study, self._home = ledger, tracker, study, home
        self._lease, self._clock = lease, clock
        self._renewed = clock.monotonic()
        self._parent: str | None = None
        self._uid = ""  # of the study whose run is `_parent`
        self._curves = 0  # how many ends its curves show
        self._unrecorded: dict[str, str] | None = None  # uid -> run id of runs without a cursor
        self._shown: dict[str, tuple[dict[str, str], str | None]] = {}  # run id -> its tags and status
        self._described: dict[str, str] = {}  # the tags of the container of the runs
        self._refused: dict[int, tuple[int, str]] = {}  # number -> rejected revision, and why
        self._without: dict[int, int] = {}  # number -> revision that was sent without its files
        self._unfetched, self._fetch_at = "", -math.inf  # the reason, and when to try again
        self.sent = 0

    def follow(self, leaving: Callable[[], bool], grace: float, wait: Callable[[float], object]) -> DrainResult:
        """Sends repeatedly; once `leaving`, stops after everything is sent, or after `grace` seconds."""
        backoff, why, deadline = Backoff(POLL, MAX_PAUSE), "", math.inf
        while True:
            last = leaving()
            deadline = min(deadline, self._clock.monotonic() + grace) if last else deadline
            try:
                self._renew()
                self.look(leaving=last)
                if last and (not self._without or self._clock.monotonic() >= deadline):
                    left = [text for _, text in self._refused.values()] + [self._unfetched] * bool(self._without)
                    return self._result("; ".join(left))
                backoff.reset()
                why = ""
            except DamagedLedger:
                raise
            except (Unreachable, Refused, StorageError) as error:
                if self._clock.monotonic() >= deadline:
                    return self._result(str(error))
                if str(error) != why and not last:  # the result says why instead
                    print(error, flush=True)
                backoff.grow()
                why = str(error)
            wait(min(backoff.seconds, 1.0) if last else backoff.seconds)

    def look(self, *, leaving: bool = False) -> None:
        """Sends everything that is new now. Raises Unreachable.

        A rejected trial is skipped and remembered, and so are files in an unreachable bucket.
        """
        self._fetch_at = -math.inf if leaving else self._fetch_at
        study, cursor = self._ledger.look(self._study_and_cursor)
        if cursor is not None and cursor.revision == LEFT:
            return
        if study.uid != self._uid:  # at first, and after all trials were set aside
            self._parent, self._unrecorded, self._shown, self._described = None, None, {}, {}
            if cursor is not None:
                self._tracker.recall(self._study, cursor.run_id)
            self._discard_what_is_ahead(study)
            self._uid = study.uid
        parent = self._open_study(study, cursor.run_id if cursor else None)
        changed = cursor is None or cursor.revision < study.revision or parent not in self._shown
        ended = self._send_all_trials(study, parent)
        if changed or ended or leaving:
            self._send_study(study, parent, leaving, whole=changed)

    def _study_and_cursor(self, connection: Connection) -> tuple[StudyRow, Cursor | None]:
        study = queries.study_row(connection, self._study)
        removal.check_whole(study)
        return study, mirror_queries.study_cursor(connection, self._tracker.name, study.id)

    def _send_all_trials(self, study: StudyRow, parent: str) -> bool:
        """Sends the trials with new data, page by page; returns True if one of them has ended."""
        after, ended = -1, False
        while True:
            page = self._ledger.look(
                lambda c, after=after: projection.pending(c, self._tracker.name, study, self._home, after)
            )
            if not page:
                return ended
            after = page[-1].number
            ended = ended or any(trial.batch.ended_at is not None for trial in page)
            self._send_trials(study, parent, [p for p in page if self._refused.get(p.number, (0,))[0] < p.revision])

    def _discard_what_is_ahead(self, study: StudyRow) -> None:
        """Deletes the runs that show data unknown to the ledger, with their cursors; they are created anew."""
        views = self._tracker.find(self._study, study.uid, children=True)
        trial_numbers = self._ledger.look(lambda connection: ahead(connection, study, views))
        if not trial_numbers:
            return
        numbers = sorted({*trial_numbers.values()})
        print(
            f"{called(self._tracker.name)} is ahead of the ledger, which was taken back, in "
            f"{counted(len(numbers), 'trial')} ({', '.join(map(str, numbers))}): their runs are made anew.",
            flush=True,
        )
        where = (self._tracker.name, study.id, numbers)
        self._lease.write(lambda connection: mirror_queries.forget(connection, *where))
        for run_id in trial_numbers:
            self._tracker.discard(run_id)

    def _open_study(self, study: StudyRow, recorded: str | None) -> str:
        """Returns the id of the study's run: the recorded one, one found by its tag, or a new one."""
        if self._parent is None:
            self._discard_set_aside(study)
            tags = {view.run_id: view.tags for view in self._tracker.find(self._study, study.uid)}
            run_ids = [*tags]
            self._parent = recorded if recorded in run_ids else next(iter(run_ids), None)
            self._curves = curves.marked(tags.get(self._parent or "", {}))
            self._discard([run_id for run_id in run_ids if run_id != self._parent])
            if self._parent is None and recorded is not None and self._tracker.restore(recorded):
                self._parent = recorded
            if self._parent is None:
                if recorded is not None:
                    print("the tracker has lost this study; all of it is sent again.", flush=True)
                    forget(self._ledger, self._tracker.name, self._study)
                self._parent = self._tracker.open_study(self._study, projection.study_run(study))
                failpoint("mirror.after_create_run")
            if self._parent != recorded:
                self._commit(study, [(STUDY, self._parent, -1)])
        return self._parent

    def _discard_set_aside(self, study: StudyRow) -> None:
        """Deletes the runs of trials that a change of the declaration has replaced; they had no value."""
        _, *before = self._ledger.look(lambda connection: removal.uids(connection, study))
        for uid in before:
            trials = self._tracker.find(self._study, uid, children=True)
            for view in [*trials, *self._tracker.find(self._study, uid)]:
                self._tracker.discard(view.run_id)

    def _send_trials(self, study: StudyRow, parent: str, trials: Sequence[projection.Pending]) -> None:
        """Sends each trial and commits the cursors of the sent ones, even if one fails."""
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
                else:  # its cursor stays, so this batch is sent again, which changes nothing
                    self._without[trial.number] = trial.revision
                self._renew()
        finally:
            self._commit(study, cursors)

    def _fetched(self, trial: projection.Pending) -> bool:
        """Returns whether the trial's files are on this host.

        If a bucket does not deliver them, reports it once and requests no files for half a minute: metrics do not wait
        for files.
        """
        if not self._tracker.keeps_files:
            return True
        if self._clock.monotonic() < self._fetch_at:
            return not trial.batch.files
        try:
            run_files.fetch(trial.location, trial.batch.files)
        except StorageError as error:
            if str(error) != self._unfetched:
                print(error, "All else is sent, and these once they can be.", flush=True)
            self._unfetched, self._fetch_at = str(error), self._clock.monotonic() + MAX_PAUSE
            return False
        self._unfetched = "" if trial.batch.files else self._unfetched
        return True

    def _send_trial(self, study: StudyRow, parent: str, trial: projection.Pending) -> str:
        run_id, batch = trial.run_id or self._recover(study, trial.run.uid), trial.batch
        if run_id is None:
            try:
                run_id = self._tracker.open_trial(parent, replace(trial.run, tags={**trial.run.tags, **batch.tags}))
            except Unreachable:
                self._unrecorded = None  # it may have been created anyway
                raise
            failpoint("mirror.after_create_run")
            if self._unrecorded is not None:
                self._unrecorded[trial.run.uid] = run_id  # it exists even if the batch is rejected
            self._shown[run_id] = (dict(batch.tags), "RUNNING")
        self._send(run_id, batch)
        if batch.ended_at is not None:
            del self._shown[run_id]
        failpoint("mirror.after_send")
        return run_id

    def _send(self, run_id: str, batch: Batch) -> None:
        """Sends `batch` without the tags and the status that the run already shows."""
        tags, status = self._shown.get(run_id, ({}, None))
        new = {key: value for key, value in batch.tags.items() if tags.get(key) != value}
        unchanged = batch.status == status and batch.ended_at is None
        self._tracker.send(run_id, replace(batch, tags=new, status=None if unchanged else batch.status))
        shown = {key: value for key, value in {**tags, **new}.items() if key not in batch.removed_tags}
        self._shown[run_id] = (shown, batch.status)
        self.sent += 1

    def _recover(self, study: StudyRow, uid: str) -> str | None:
        """Returns the id of a run that was created but not recorded, because of a crash or a lost answer."""
        if self._unrecorded is None:
            self._unrecorded = self._search(study)
        return self._unrecorded.get(uid)

    def _search(self, study: StudyRow) -> dict[str, str]:
        """Returns uid -> run id of the runs without a cursor; deletes the later of two runs of one trial."""
        where = (self._tracker.name, study.id)
        cursors = self._ledger.look(lambda connection: mirror_queries.cursors(connection, *where))
        recorded = {f"{study.uid}/{number}": cursor.run_id for number, cursor in cursors.items()}
        unrecorded: dict[str, str] = {}
        superfluous: list[str] = []
        for view in self._tracker.find(self._study, study.uid, children=True):
            standing = recorded.get(view.uid) or unrecorded.setdefault(view.uid, view.run_id)
            if standing != view.run_id:
                superfluous.append(view.run_id)
        self._discard(superfluous)
        return unrecorded

    def _discard(self, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            print(f"run {run_id} stands twice; it is deleted.", flush=True)
            self._tracker.discard(run_id)

    def _send_study(self, study: StudyRow, parent: str, leaving: bool, whole: bool) -> None:
        batch = self._ledger.look(lambda connection: self._study_batch(connection, study, leaving))
        if (tags := self._ledger.look(lambda c: projection.experiment_tags(c, study))) != self._described:
            self._tracker.describe(self._study, {k: v for k, v in tags.items() if self._described.get(k) != v})
            self._described = tags
        if whole or batch.points or self._shown.get(parent) != (batch.tags, batch.status):
            self._send(parent, batch if whole else replace(batch, texts={}, files={}, datasets=()))
            failpoint("mirror.after_study")
            self._curves = curves.marked(batch.tags)
        if whole:
            self._commit(study, [(STUDY, parent, study.revision)])

    def _study_batch(self, connection: Connection, study: StudyRow, leaving: bool) -> Batch:
        state = queries.study_state(connection, study)
        if leaving and state == "running":
            state = "interrupted"  # no process will be left to record this
        return projection.study_batch(connection, study, self._home, state, self._curves)

    def _commit(self, study: StudyRow, cursors: Sequence[tuple[int, str, int]]) -> None:
        """Records runs and their progress; raises Busy if another process has begun to mirror the study."""
        if not cursors:
            return
        self._tracker.flush()
        where = (self._tracker.name, study.id)
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
    """Drops the cursors of a study: the next drain finds its runs by their tags or creates them, and sends all
    again."""

    def body(connection: Connection) -> None:
        mirror_queries.forget(connection, tracker_name, queries.study_row(connection, study).id)

    ledger.transact(body)
