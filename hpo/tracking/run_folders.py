"""Keeps each run in a folder: the base of trackers whose output people open with another program.

    DIR/<study>/hpo.json              the study's run
    DIR/<study>/<trial>/hpo.json      a trial's, with its points in a file beside it

Points are appended and made durable before the record mentions them. A process killed while appending leaves an
incomplete point at the end: the next one cuts it off first and skips the points that are already there. So the ledger
may send the same points again, and each is stored once.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpo.tracking.base import Batch, ModelView, Point, Refused, Run, RunView, Unreachable
from trainer.files.durable import write_text

RECORD = "hpo.json"
_OVER = ("FINISHED", "KILLED", "FAILED")


class FolderTracker(ABC):
    """Keeps points, parameters, tags and states; neither files nor models. A run's id is its uid."""

    keeps_files = False

    def __init__(self, root: Path) -> None:
        self.name = str(root)  # until it is replaced by the tracker's URI
        self._root = root
        self._folders: dict[str, Path] = {}
        self._stored: dict[str, set[tuple[str, int]]] = {}  # uid -> what the file of a running run holds

    @abstractmethod
    def read(self, folder: Path) -> list[Point]:
        """Returns the whole points in a folder's file."""

    @abstractmethod
    def append(self, folder: Path, points: Sequence[Point]) -> None:
        """Appends points durably after the last whole one."""

    def show(self, folder: Path, before: Mapping[str, object], now: Mapping[str, object]) -> None:
        """Shows what has changed in a run's record; called again after a kill."""
        return

    def open_study(self, study: str, run: Run) -> str:
        folder = self._root / study
        if folder.exists() and self._record_in(folder).get("uid") not in (None, run.uid):
            folder = self._root / f"{study}.{run.uid[:8]}"  # another study of that name
        return self._open(folder, study, run)

    def open_trial(self, parent: str, run: Run) -> str:
        folder = self._folder(parent)
        return self._open(folder / run.name, self._record_in(folder)["study"], run)

    def describe(self, study: str, tags: Mapping[str, str]) -> None:
        """Does nothing: no file shows the tags of a study's container."""
        return

    def find(self, study: str, uid: str, *, children: bool = False) -> list[RunView]:
        records = self._records().values()
        return [
            self._view(record)
            for record in records
            if (record["uid"].startswith(f"{uid}/") if children else record["uid"] == uid)
        ]

    def send(self, run_id: str, batch: Batch) -> None:
        folder = self._folder(run_id)
        before = self._record_in(folder)
        stored = self._stored.pop(run_id, None)  # until all is written: a full disk may cut it, so it is read again
        with self._reaching():
            if stored is None:
                stored = {(point.key, point.step) for point in self.read(folder)}
            points = {(point.key, point.step): point for point in batch.points}  # a metric may be called `objective`
            if new := [point for key, point in points.items() if key not in stored]:
                self.append(folder, new)
                stored |= points.keys()
            record = self._changed(before, batch)
            self.show(folder, before, record)
            if record != before:
                write_text(folder / RECORD, json.dumps(record, indent=1, sort_keys=True) + "\n")
        if record["ended_at"] is None:
            self._stored[run_id] = stored

    def discard(self, run_id: str) -> None:
        if folder := self._known().get(run_id):
            with self._reaching():
                shutil.rmtree(folder, ignore_errors=not folder.exists())
            del self._folders[run_id]

    def recall(self, study: str, run_id: str) -> str:
        """Returns the study's name: runs are found wherever they are."""
        return study

    def restore(self, run_id: str) -> bool:
        """Returns False: what is deleted here is gone."""
        return False

    def names(self, run_id: str) -> set[str]:
        return set()

    def remove(self, study: str, uid: str) -> None:
        for view in [*self.find(study, uid, children=True), *self.find(study, uid)]:
            self.discard(view.run_id)

    def points(self, runs: Sequence[RunView]) -> Iterator[tuple[str, Point]]:
        for view in runs:
            with self._reaching():
                stored_points = self.read(self._folder(view.run_id))
            yield from ((view.run_id, point) for point in stored_points)

    def digests(self, run_id: str) -> dict[str, str]:
        return {}

    def models(self, study: str) -> list[ModelView]:
        return []

    def model_digests(self, model_id: str) -> dict[str, str]:
        return {}

    def flush(self) -> None:
        """Does nothing: every file is durable once it is written."""
        return

    def close(self) -> None:
        """Does nothing: every file is closed once it is written."""
        return

    @staticmethod
    def _changed(record: Mapping[str, Any], batch: Batch) -> dict[str, Any]:
        for path, value in batch.params.items():
            if record["params"].get(path, value) != value:
                raise Refused(f"parameter {path} is {record['params'][path]} there and {value} here")
        status = batch.status or record["status"]
        ended_at = (batch.ended_at or record["ended_at"]) if status in _OVER else None
        merged: dict[str, Any] = {name: record[name] | dict(getattr(batch, name)) for name in ("params", "tags")}
        merged["tags"] = {key: tag for key, tag in merged["tags"].items() if key not in batch.removed_tags}
        merged["keys"] = sorted({*record["keys"], *(point.key for point in batch.points)})
        return {**record, **merged, "status": status, "ended_at": ended_at}

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
        """Returns folder -> the record of its run; skips files of that name from other programs."""
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
        return record if isinstance(record, dict) and "uid" in record else {}  # pyright: ignore[reportUnknownVariableType]

    def _view(self, record: Mapping[str, Any]) -> RunView:
        uid, status, ended_at = record["uid"], record["status"], record["ended_at"]
        return RunView(uid, uid, status, ended_at, record["tags"], record["params"], frozenset(record["keys"]))

    @contextmanager
    def _reaching(self) -> Generator[None, None, None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise Unreachable(f"{self.name} cannot be written now ({error.strerror})") from error
