"""`metrics.json`: how a trial ended, as a file beside its checkpoints and as an artifact of its run in MLflow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpo.clock import Clock, SystemClock
from hpo.errors import StorageError
from hpo.ledger import Ledger, file_queries, queries
from hpo.ledger.json import plain
from hpo.ledger.rows import Connection, RowMapping
from hpo.storage.home import Home
from hpo.text import command
from trainer.files.durable import write_text

NAME = "metrics.json"
EVERY = 1.0  # seconds between looks at the ledger


def text(
    study: RowMapping,
    trial: RowMapping,
    values: Mapping[str, float],
    judged: queries.Judged | None,
    kept: Sequence[RowMapping],
    place: Callable[[RowMapping], str],
) -> str:
    """The file's content: `values` are each metric's last, `judged` those of where the objectives' values come from,
    `kept` the rows of the checkpoints kept; `place` says where one is, from the file."""
    names = [objective["metric"] for objective in study["spec"]["objectives"]]
    bounded = [one["metric"] for one in study["spec"].get("constraints", ())]
    best = next((row for row in kept if row["best"]), None)
    content = {
        "study": study["name"],
        "trial": trial["number"],
        "state": trial["state"],
        "step": trial["step"],
        "epoch": trial["epoch"],
        "objective": dict(zip(names, trial["values"], strict=False)) if trial["values"] else {},
        **({"violations": dict(zip(bounded, trial["violations"] or (), strict=False))} if bounded else {}),
        "judged": judged and asdict(judged) | {"metrics": dict(sorted(judged.metrics.items()))},
        "metrics": dict(sorted(values.items())),
        "best": best and _checkpoint(best, place),
        "last": _checkpoint(kept[-1], place) if kept else None,
    }
    return json.dumps(plain(content), indent=2) + "\n"


def _checkpoint(row: RowMapping, place: Callable[[RowMapping], str]) -> dict[str, Any]:
    return {name: row[name] for name in ("step", "epoch", "metrics")} | {"checkpoint": place(row)}


def path(home: Home, study: str, number: int) -> Path:
    """Where the file of a trial lies."""
    return home.checkpoints(study, number) / NAME


def texts(connection: Connection, study: RowMapping, ended: Sequence[RowMapping]) -> dict[int, str]:
    """Trial number -> the content of its file in the home, for rows of trials that have ended."""
    found: dict[int, str] = {}
    for start in range(0, len(ended), queries.PAGE):
        page = ended[start : start + queries.PAGE]
        ids = [row["id"] for row in page]
        values, judged = queries.last_values(connection, ids), queries.judged(connection, study, page)
        kept = file_queries.kept(connection, ids)
        for row in page:
            own = kept.get(row["id"], [])
            last, at = values.get(row["id"], {}), judged.get(row["id"])
            found[row["number"]] = text(study, row, last, at, own, lambda one: one["path"])
    return found


class Results:
    """Writes the file of every trial that has ended, once; what a killed driver left out, the next one writes."""

    def __init__(self, ledger: Ledger, study: str, home: Home, clock: Clock | None = None) -> None:
        self._ledger, self._study, self._home = ledger, study, home
        self._clock = clock or SystemClock()
        self._written: set[int] = set()
        self._first = 0  # all below are written
        self._next = self._clock.monotonic()

    def tick(self) -> None:
        """Write what is new, if the last look is a while ago."""
        if self._clock.monotonic() >= self._next:
            self.write()
            self._next = self._clock.monotonic() + EVERY

    def write(self) -> None:
        """Write what is new. Raises StorageError where the home takes no file."""
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
        ended = file_queries.ended_from(connection, study["id"], self._first)
        unknown = [number for number in ended if number not in self._written]
        # Of what lies there already nothing is read: a resume of a large study would begin with that.
        self._written |= {number for number in unknown if os.path.exists(path(self._home, self._study, number))}
        new = [number for number in unknown if number not in self._written][: queries.PAGE]
        return texts(connection, study, queries.numbered(connection, study["id"], new))
