"""Holds the subjects of live pages: a home's studies, or one trial. Each has a version.

Only one thread at a time looks at a subject, whoever listens. A subject is never written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hpo.analysis.report.curves import thin
from hpo.analysis.report.data import told
from hpo.analysis.results import status as statuses
from hpo.ledger import answer, queries
from hpo.ledger.rows import StudyRow
from hpo.ledger.views import live as live_queries

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.ledger.rows import Connection

Listed = dict[str, Any]  # one study of the list, as JSON values
MOST_POINTS = 40  # points of a study's line in the list


class Message(NamedTuple):
    """A message to a listener with an older version of a subject.

    event    refresh: load the page again; gone: the subject no longer exists; rows: its changes follow
    data     the changes for rows, as JSON values
    """

    event: str
    version: int
    data: dict[str, Any] | None = None


class Subject(Protocol):
    """The subject of a page: `look` raises `version` with each change; `message` tells a listener what it lacks."""

    @property
    def version(self) -> int: ...

    def look(self) -> None:
        """Reads what is new. Raises HpoError if the ledger cannot be read."""
        ...

    def message(self, since: int | None) -> Message:
        """Returns the message for a listener that has version `since`, or None if it has no valid version."""
        ...


class LiveHome:
    """Follows the studies of a ledger, one row for each."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self.version, self.rows = ledger, 0, list[Listed]()
        self._seen = ""

    def look(self) -> None:
        self.rows = self._ledger.look(_rows)
        seen = json.dumps(self.rows)
        self.version += seen != self._seen
        self._seen = seen

    def message(self, since: int | None) -> Message:
        return Message("refresh", self.version)


def _rows(connection: Connection) -> list[Listed]:
    source_of = queries.derived(connection)
    rows: list[Listed] = []
    for name in queries.study_names(connection):
        status, study = queries.status(connection, name), queries.study_row(connection, name)
        objective = study.spec.objectives[0]
        first = status.best or next(iter(status.front), None)
        row = {
            "name": name,
            "created_at": study.created_at,
            "of": source_of.get(name, ""),
            "requested": status.requested,
        }
        row |= {"trials": sum(status.trials.values()), "ended": statuses.ended(status), "front": len(status.front)}
        row |= {"metric": objective["metric"], "direction": objective["direction"], **told(status)}
        seeds = first.seeds if first else None
        row |= {"best": first and first.value, "number": first and first.number, "mean": None, "error": None}
        if seeds:
            row |= {"mean": seeds.means[objective["metric"]], "error": seeds.errors[objective["metric"]]}
        rows.append(row | {"line": best_so_far(connection, study, row["trials"])})
    return in_families(rows)


def in_families(listed: Sequence[Listed]) -> list[Listed]:
    """Returns the studies, the newest first, with each derived study below the one of its name `of`.

    `depth` counts the studies above it. A study whose source was deleted stands for itself.
    """
    names, below = {entry["name"] for entry in listed}, dict[str, list[Listed]]()
    for entry in sorted(listed, key=lambda entry: -entry["created_at"]):
        below.setdefault(entry["of"] if entry["of"] in names else "", []).append(entry)

    def family(name: str, depth: int) -> Iterator[Listed]:
        for entry in below.get(name, ()):
            yield entry | {"depth": depth}
            yield from family(entry["name"], depth + 1)

    return list(family("", 0))


def best_so_far(connection: Connection, study: StudyRow, trials: int) -> list[tuple[int, float]]:
    """Returns the number and the value of complete trials, each value the best so far by the first objective.

    The last value is repeated at the last of `trials`.
    """
    least = study.spec.objectives[0]["direction"] == "minimize"
    line = list[tuple[int, float]]()
    for number, values in answer.scored(connection, study).items():
        better = min if least else max
        line.append((number, better(values[0], line[-1][1]) if line else values[0]))
    line = [point for point in line if math.isfinite(point[1])]
    return [*thin(line, MOST_POINTS), *((trials - 1, value) for _, value in line[-1:])]


class LiveTrial:
    """Follows one trial, identified by its study's uid: a study that was created again has other trials."""

    def __init__(self, ledger: Ledger, study: str, number: int) -> None:
        self._ledger, self._study, self._number = ledger, study, number
        self.version, self._seen, self._there = 0, None, True

    def look(self) -> None:
        seen = self._ledger.look(self._revision)
        self._there = seen is not None
        self.version += seen != self._seen
        self._seen = seen

    def message(self, since: int | None) -> Message:
        return Message("refresh" if self._there else "gone", self.version)

    def _revision(self, connection: Connection) -> tuple[Any, ...] | None:
        study = queries.find_study(connection, self._study)
        rows = live_queries.moved(connection, study.id, 2**31 - 1, [self._number]) if study else []
        runs = live_queries.runs(connection, study.id, self._number) if study else {}
        return (study.uid, *rows[0], *runs.values()) if study and rows else None
