"""What a live page is of: a home's studies, or one trial. Each says what version of it there is now.

A subject is looked at by one thread at a time, whoever listens, and never written.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hpo.analysis.report.data import told
from hpo.ledger import live_queries, queries

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.ledger.rows import Connection


class Message(NamedTuple):
    """What one is told who has another `version` of a subject.

    event    refresh: the page is to be read anew; gone: there is nothing any more; rows: what has changed
    data     of rows, as JSON values
    """

    event: str
    version: int
    data: dict[str, Any] | None = None


class Subject(Protocol):
    """`version` grows with each change that `look` finds; `message` is what tells one who has `since` of it."""

    @property
    def version(self) -> int: ...

    def look(self) -> None:
        """Read what is new. Raises HpoError where the ledger cannot be read."""
        ...

    def message(self, since: int | None) -> Message:
        """What one is told who has come to version `since`, or to none of those that there are."""
        ...


class LiveHome:
    """The studies of a ledger: one row for each."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self.version, self.rows = ledger, 0, list[dict[str, Any]]()
        self._seen = ""

    def look(self) -> None:
        self.rows = self._ledger.look(_rows)
        seen = json.dumps(self.rows)
        self.version += seen != self._seen
        self._seen = seen

    def message(self, since: int | None) -> Message:
        return Message("refresh", self.version)


def _rows(connection: Connection) -> list[dict[str, Any]]:
    of = queries.derived(connection)
    found: list[dict[str, Any]] = []
    for name in queries.study_names(connection):
        status, study = queries.status(connection, name), queries.study_row(connection, name)
        objective = study["spec"]["objectives"][0]
        first = status.best or next(iter(status.front), None)
        row = {"name": name, "created_at": study["created_at"], "of": of.get(name, ""), "requested": status.requested}
        row |= {"trials": sum(status.trials.values()), "metric": objective["metric"], **told(status)}
        found.append(row | {"best": first and first.value, "number": first and first.number})
    return sorted(found, key=lambda row: -row["created_at"])


class LiveTrial:
    """One trial of a study, known by the study's uid: a study that was made anew has other trials."""

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
        rows = live_queries.moved(connection, study["id"], 2**31 - 1, [self._number]) if study else []
        runs = live_queries.runs(connection, study["id"], self._number) if study else {}
        return (study["uid"], *rows[0], *runs.values()) if study and rows else None
