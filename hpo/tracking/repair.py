"""Reconciles `hpo sync` with the changes that people made in a tracker's pages.

Renamed objects are followed; deleted or changed ones are restored or stay deleted; added ones are left alone.

A run that stays deleted keeps its cursor at LEFT: nothing is sent to it, and `hpo verify` skips it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hpo.ledger import Ledger, leases, queries
from hpo.ledger.rows import StudyRow
from hpo.ledger.views import mirror as mirror_queries
from hpo.ledger.views.mirror import LEFT, STUDY, Cursor
from hpo.storage.home import Home
from hpo.text import command, counted
from hpo.tracking import pages, projection
from hpo.tracking.base import Batch, Deleted, RunView, Tracker

Deletions = Literal["restore", "leave"]


def unlike(view: RunView, batch: Batch, opened_with: Mapping[str, str]) -> Iterator[tuple[str, Any, Any]]:
    """Yields each difference between a run and its batch as (name, the run's value, the batch's value).

    Compares only the platform's own tags, the status, the end and the data sets.
    """
    tags = {**opened_with, **batch.tags}
    shown = {key: view.tags.get(key) for key in tags if key in view.tags or key not in projection.LATER}
    shown |= {key: view.tags[key] for key in batch.removed_tags if key in view.tags}
    shown.pop(pages.NOTE, None)  # which people may edit
    read = {(dataset.name, dataset.digest) for dataset in batch.datasets}
    if view.datasets and not view.datasets >= read:  # an earlier release sent none
        yield "data sets", sorted(view.datasets), sorted(read)
    earlier = projection.EARLIER_STATUS.get(batch.tags["hpo.state"])
    for label, value, wanted in (
        ("status", batch.status if view.status == earlier else view.status, batch.status),
        ("end", view.ended_at, batch.ended_at),
        *((f"tag {key}", shown[key], tags.get(key)) for key in shown),
    ):
        if value != wanted:
            yield label, value, wanted


def repair(
    ledger: Ledger, tracker: Tracker, study: StudyRow, lease: leases.Lease, *, home: Home, deleted: Deletions | None
) -> list[str]:
    """Prepares the data that the mirror sends again next; returns a clause for each change.

    Without `deleted`, runs that must stay deleted do so, and others are restored. Raises Unreachable.
    """
    where = (tracker.name, study.id)
    cursors = ledger.look(lambda connection: mirror_queries.cursors(connection, *where))
    if STUDY not in cursors:
        return []
    work = _Repair(ledger, tracker, study, home, cursors, notes=[], to={}, gone=[])
    if work.follow(deleted):
        work.look_for_deleted(deleted)
        if deleted != "leave" and LEFT not in (cursors[STUDY].revision, work.to.get(STUDY)):
            work.look_for_changes()
    moves = [(number, cursors[number].run_id, revision) for number, revision in work.to.items()]
    lease.write(lambda connection: mirror_queries.forget(connection, *where, work.gone))
    lease.write(lambda connection: mirror_queries.move(connection, *where, moves) if moves else None)
    return work.notes


@dataclass
class _Repair:
    ledger: Ledger
    tracker: Tracker
    study: StudyRow
    home: Home
    cursors: Mapping[int, Cursor]
    notes: list[str]
    to: dict[int, int]  # number -> the revision that its cursor gets; 0 sends everything again
    gone: list[int]  # numbers of the runs that cannot be restored and are created anew

    def follow(self, deleted: Deletions | None) -> bool:
        """Finds the experiment by the recorded run; returns False if it stays deleted."""
        name, recorded = self.study.name, self.cursors[STUDY]
        try:
            called = self.tracker.recall(name, recorded.run_id)
        except Deleted:
            if deleted == "leave":
                self.to |= dict.fromkeys(self.cursors, LEFT)
                self._say({STUDY: None}, f"deleted there with its experiment, and left so: {self._again}")
                return False
            if recorded.revision == LEFT and deleted is None:
                return False
            self.tracker.restore(recorded.run_id)
            called = self.tracker.recall(name, recorded.run_id)
            self.notes.append("its experiment, which was deleted there, is restored")
        if called != name:
            self.notes.append(f"its experiment is called {called!r} there")
        return True

    def look_for_deleted(self, deleted: Deletions | None) -> None:
        name, uid = self.study.name, self.study.uid
        views = [*self.tracker.find(name, uid), *self.tracker.find(name, uid, children=True)]
        standing = {view.run_id: view for view in views}
        recorded = {cursor.run_id for cursor in self.cursors.values()}
        for view in views:  # restoring an experiment also restores what this platform deleted in it
            if view.run_id not in recorded and self._number(view) in self.cursors:
                self.tracker.discard(view.run_id)
        absent = {number: cursor for number, cursor in self.cursors.items() if cursor.run_id not in standing}
        self.to |= {
            n: self._all(n) for n, cursor in self.cursors.items() if cursor.revision == LEFT and n not in absent
        }
        if deleted == "leave":
            self.to |= dict.fromkeys(absent, LEFT)
            self._say(absent, f"deleted there, and left so: {self._again}")
            return
        missing = [n for n, cursor in absent.items() if deleted == "restore" or cursor.revision != LEFT]
        restored = {number: self.tracker.restore(absent[number].run_id) for number in missing}
        self.to |= {number: self._all(number) for number in missing if restored[number]}
        self.gone = [number for number in missing if not restored[number]]
        self._say(missing, "deleted there, and made again")

    def look_for_changes(self) -> None:
        """Finds status, tags, files and models that differ from what was sent."""
        name, uid = self.study.name, self.study.uid
        views = {view.run_id: view for view in self.tracker.find(name, uid, children=True)}
        models = {(model.run_id, model.name) for model in self.tracker.models(name) if model.finished}
        with self.ledger.read() as connection:
            study = queries.study_row(connection, name)
            state = queries.study_state(connection, study)
            for trial in projection.everything(connection, study, self.home):
                cursor = self.cursors.get(trial.number)
                view = views.get(cursor.run_id) if cursor and cursor.revision == trial.revision else None
                if view is not None and trial.number not in self.to:
                    self._compare(trial.number, view, trial.batch, trial.run.tags, models)
            whole = projection.study_batch(connection, study, self.home, state)
        [view, *_] = [*self.tracker.find(name, uid), None]
        if view is not None and self.cursors[STUDY].revision == study.revision and state != "running":
            self._compare(STUDY, view, whole, projection.study_run(study).tags, models)

    def _compare(
        self, number: int, view: RunView, batch: Batch, tags: Mapping[str, str], models: set[tuple[str, str]]
    ) -> None:
        changed = [name for name, _, _ in unlike(view, batch, tags)]
        if self.tracker.keeps_files:
            names = self.tracker.names(view.run_id)
            lacking = [file for file in (*batch.texts, *batch.files) if not _stands(file, names)]
            changed += lacking + [model.name for model in batch.models if (view.run_id, model.name) not in models]
        if changed:
            self.to[number] = self._all(number)
            self.notes.append(f"{_of(number)}: {', '.join(changed)} changed there, and sent again")

    def _say(self, numbers: Sequence[int] | Mapping[int, object], what: str) -> None:
        if numbers:
            run_names = ", ".join(_of(number) for number in sorted(numbers)[:20])
            more = ", ..." if len(numbers) > 20 else ""
            self.notes.append(f"{counted(len(numbers), 'run')} ({run_names}{more}) {what}")

    @property
    def _again(self) -> str:
        words = f"sync --study {self.study.name} --deleted restore"
        return f"`{command(words)}` makes it again"

    @staticmethod
    def _all(number: int) -> int:
        """Returns the revision from which everything is sent."""
        return -1 if number == STUDY else 0

    def _number(self, view: RunView) -> int:
        return STUDY if view.uid == self.study.uid else int(view.uid.rpartition("/")[2])


def _of(number: int) -> str:
    return "the study" if number == STUDY else f"trial {number}"


def _stands(name: str, there: set[str]) -> bool:
    return name in there or any(other.startswith(f"{name}/") for other in there)
