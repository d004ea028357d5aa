"""Writes `metrics.json`, a trial's result, beside its checkpoints; it is also an artifact of its run in MLflow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpo.clock import Clock, SystemClock
from hpo.errors import StorageError
from hpo.ledger import Ledger, queries
from hpo.ledger.database.json import plain
from hpo.ledger.rows import CheckpointRow, Connection, StudyRow, TrialRow
from hpo.ledger.views import files as file_queries
from hpo.storage.home import Home
from hpo.text import command
from trainer.files.durable import write_text

NAME = "metrics.json"
EVERY = 1.0  # seconds between looks at the ledger


def text(
    study: StudyRow,
    trial: TrialRow,
    values: Mapping[str, float],
    judged: queries.Judged | None,
    kept: Sequence[CheckpointRow],
    path_of: Callable[[CheckpointRow], str],
) -> str:
    """Returns the file's content.

    `values` are the last ones of each metric, `judged` those that the objectives come from, `kept` the rows of the kept
    checkpoints; `path_of` returns the path of a checkpoint, relative to the file.
    """
    names = [objective["metric"] for objective in study.spec.objectives]
    bounded = [constraint["metric"] for constraint in study.spec.constraints]
    best = next((row for row in kept if row.best), None)
    content = {
        "study": study.name,
        "trial": trial.number,
        "state": trial.state,
        "step": trial.step,
        "epoch": trial.epoch,
        "objective": dict(zip(names, trial.values, strict=False)) if trial.values else {},
        **({"violations": dict(zip(bounded, trial.violations or (), strict=False))} if bounded else {}),
        "judged": judged and {**vars(judged), "metrics": dict(sorted(judged.metrics.items()))},
        "metrics": dict(sorted(values.items())),
        "best": best and _checkpoint(best, path_of),
        "last": _checkpoint(kept[-1], path_of) if kept else None,
    }
    return json.dumps(plain(content), indent=2) + "\n"


def _checkpoint(row: CheckpointRow, path_of: Callable[[CheckpointRow], str]) -> dict[str, Any]:
    return {"step": row.step, "epoch": row.epoch, "metrics": row.metrics, "checkpoint": path_of(row)}


def path(home: Home, study: str, number: int) -> Path:
    """Returns the path of a trial's file."""
    return home.checkpoints(study, number) / NAME


def texts(connection: Connection, study: StudyRow, ended: Sequence[TrialRow]) -> dict[int, str]:
    """Returns trial number -> the content of its file in the home, for rows of ended trials."""
    contents: dict[int, str] = {}
    for start in range(0, len(ended), queries.PAGE):
        page = ended[start : start + queries.PAGE]
        ids = [row.id for row in page]
        values, judged = queries.last_values(connection, ids), queries.judged(connection, study, page)
        kept = file_queries.kept(connection, ids)
        for row in page:
            checkpoints = kept.get(row.id, [])
            last, at = values.get(row.id, {}), judged.get(row.id)
            contents[row.number] = text(study, row, last, at, checkpoints, lambda checkpoint: checkpoint.path)
    return contents


class Results:
    """Writes the file of every ended trial once; the next driver writes those that a killed driver missed."""

    def __init__(self, ledger: Ledger, study: str, home: Home, clock: Clock | None = None) -> None:
        self._ledger, self._study, self._home = ledger, study, home
        self._clock = clock or SystemClock()
        self._written: set[int] = set()
        self._first = 0  # all below it are written
        self._next = self._clock.monotonic()

    def tick(self) -> None:
        """Writes new files if enough time has passed since the last call."""
        if self._clock.monotonic() >= self._next:
            self.write()
            self._next = self._clock.monotonic() + EVERY

    def write(self) -> None:
        """Writes new files. Raises StorageError if the home cannot be written."""
        while new := self._ledger.look(self._new):
            for number, content in new.items():
                self._write(path(self._home, self._study, number), content)
                self._written.add(number)

    def _write(self, target: Path, content: str) -> None:
        try:
            write_text(target, content)
        except OSError as error:
            fix = f"make room or make it writable, then `{command(f'resume --study {self._study}')}`"
            raise StorageError(f"{target} cannot be written ({error.strerror}): {fix}.") from error

    def _new(self, connection: Connection) -> dict[int, str]:
        study = queries.study_row(connection, self._study)
        while self._first in self._written:
            self._first += 1
        ended = file_queries.ended_from(connection, study.id, self._first)
        unknown = [number for number in ended if number not in self._written]
        # Existing files are not read, which would slow down the resume of a large study.
        self._written |= {number for number in unknown if os.path.exists(path(self._home, self._study, number))}
        new = [number for number in unknown if number not in self._written][: queries.PAGE]
        return texts(connection, study, queries.numbered(connection, study.id, new))
