"""A tracker that keeps each run in a folder: the base of those that people open with a program of their own.

    DIR/<study>/hpo.json              the study's run
    DIR/<study>/<trial>/hpo.json      a trial's, with its points in a file beside it

Points are appended, and made durable before the record says so. A process that is killed in the middle of one leaves a
tail that is no whole point: whoever appends next cuts it off first, and leaves out what stands already. So the ledger
may send the same again, and no point stands twice.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpo.tracking.base import Batch, ModelView, Point, Refused, Run, RunView, Unreachable
from trainer.files.durable import write_text

RECORD = "hpo.json"
_OVER = ("FINISHED", "KILLED", "FAILED")


class FolderTracker(ABC):
    """Keeps points, parameters, tags and states; no files and no models. A run's id is its uid."""

    keeps_files = False

    def __init__(self, kind: str, root: Path) -> None:
        self.name = f"{kind}:{root}"
        self._root = root
        self._folders: dict[str, Path] = {}
        self._stored: dict[str, set[tuple[str, int]]] = {}  # uid -> what stands in the file, of runs that go on

    @abstractmethod
    def _read(self, folder: Path) -> list[Point]:
        """The points that stand in a folder; what follows the last whole one is left out."""

    @abstractmethod
    def _append(self, folder: Path, points: Sequence[Point]) -> None:
        """Add points durably, after the last whole one."""

    @abstractmethod
    def _show(self, folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Show what the record of a run says now, and did not say before; asked again after a kill."""

    def open_study(self, study: str, run: Run) -> str:
        folder = self._root / study
        if folder.exists() and self._record_in(folder).get("uid") not in (None, run.uid):
            folder = self._root / f"{study}.{run.uid[:8]}"  # another study of that name
        return self._open(folder, study, run)

    def open_trial(self, parent: str, run: Run) -> str:
        folder = self._folder(parent)
        return self._open(folder / run.name, self._record_in(folder)["study"], run)

    def describe(self, study: str, tags: Mapping[str, str]) -> None:
        """Nothing shows the tags of what holds a study's runs."""
        return

    def find(self, study: str, uid: str, *, children: bool = False) -> list[RunView]:
        there = self._records().values()
        return [
            self._view(one) for one in there if (one["uid"].startswith(f"{uid}/") if children else one["uid"] == uid)
        ]

    def send(self, run_id: str, batch: Batch) -> None:
        folder = self._folder(run_id)
        before = self._record_in(folder)
        stored = self._stored.pop(run_id, None)  # until all of it is written: what a full disk has cut is read again
        with self._reaching():
            if stored is None:
                stored = {(point.key, point.step) for point in self._read(folder)}
            points = {(point.key, point.step): point for point in batch.points}  # a metric may be called `objective`
            if new := [point for place, point in points.items() if place not in stored]:
                self._append(folder, new)
                stored |= points.keys()
            record = self._changed(before, batch)
            self._show(folder, before, record)
            if record != before:
                write_text(folder / RECORD, json.dumps(record, indent=1, sort_keys=True) + "\n")
        if record["ended_at"] is None:
            self._stored[run_id] = stored

    def discard(self, run_id: str) -> None:
        if folder := self._known().get(run_id):
            with self._reaching():
                shutil.rmtree(folder, ignore_errors=not folder.exists())
            del self._folders[run_id]

    def remove(self, study: str, uid: str) -> None:
        for view in [*self.find(study, uid, children=True), *self.find(study, uid)]:
            self.discard(view.run_id)

    def points(self, runs: Sequence[RunView]) -> Iterator[tuple[str, Point]]:
        for view in runs:
            with self._reaching():
                found = self._read(self._folder(view.run_id))
            yield from ((view.run_id, point) for point in found)

    def digests(self, run_id: str) -> dict[str, str]:
        return {}

    def models(self, study: str) -> list[ModelView]:
        return []

    def model_digests(self, model_id: str) -> dict[str, str]:
        return {}

    def flush(self) -> None:
        """Every file is on the disk once it is written."""
        return

    def close(self) -> None:
        """Every file is closed once it is written."""
        return

    @staticmethod
    def _changed(record: Mapping[str, Any], batch: Batch) -> dict[str, Any]:
        for path, value in batch.params.items():
            if record["params"].get(path, value) != value:
                raise Refused(f"parameter {path} is {record['params'][path]} there and {value} here")
        status = batch.status or record["status"]
        ended = (batch.ended_at or record["ended_at"]) if status in _OVER else None
        merged: dict[str, Any] = {name: record[name] | dict(getattr(batch, name)) for name in ("params", "tags")}
        merged["tags"] = {key: one for key, one in merged["tags"].items() if key not in batch.removed_tags}
        merged["keys"] = sorted({*record["keys"], *(point.key for point in batch.points)})
        return {**record, **merged, "status": status, "ended_at": ended}

    def _open(self, folder: Path, study: str, run: Run) -> str:
        record = {"uid": run.uid, "study": study, "name": run.name, "started_at": run.started_at, "status": "RUNNING"}
        record |= {"ended_at": None, "params": {}, "keys": [], "tags": dict(run.tags)}
        with self._reaching():
            write_text(folder / RECORD, json.dumps(record, indent=1, sort_keys=True) + "\n")
        self._folders[run.uid] = folder
        self._stored.pop(run.uid, None)
        return run.uid

    def _known(self) -> dict[str, Path]:
        if not self._folders:
            self._folders = {record["uid"]: folder for folder, record in self._records().items()}
        return self._folders

    def _records(self) -> dict[Path, dict[str, Any]]:
        """Folder -> the record of its run; files of that name that are none of ours are left alone."""
        with self._reaching():
            folders = sorted(path.parent for path in self._root.glob(f"**/{RECORD}"))
        return {folder: record for folder in folders if (record := self._record_in(folder))}

    def _folder(self, run_id: str) -> Path:
        folder = self._known().get(run_id)
        if folder is None or not (folder / RECORD).exists():
            raise Refused(f"its run {run_id} is not in {self.name} (deleted there?)")
        return folder

    def _record_in(self, folder: Path) -> dict[str, Any]:
        try:
            with self._reaching():
                record = json.loads((folder / RECORD).read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return record if isinstance(record, dict) and "uid" in record else {}

    def _view(self, record: Mapping[str, Any]) -> RunView:
        uid, status, ended_at = record["uid"], record["status"], record["ended_at"]
        return RunView(uid, uid, status, ended_at, record["tags"], record["params"], frozenset(record["keys"]))

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise Unreachable(f"{self.name} cannot be written now ({error.strerror})") from error
