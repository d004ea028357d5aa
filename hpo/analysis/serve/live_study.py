"""A study that is watched: the report of it, made now and then, and between two of them the trials that have changed.

Each change has a version. A trial is stamped with the version at which it was last seen to change, so whoever has
version v lacks the trials stamped above v: they are read once more, whole, and sent as the part of a report that is of
them. So nothing is queued for anybody, and what comes twice changes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpo.analysis.report import data
from hpo.analysis.serve.subjects import Message
from hpo.errors import StudyError
from hpo.ledger import live_queries, queries
from hpo.space.trial_state import TERMINAL_STATES

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.ledger.live_queries import Moved
    from hpo.ledger.rows import Connection, RowMapping
    from hpo.storage.home import Home

SHARE = 20  # a report is made anew at most this many times less often than it takes to make it
SOON = 3.0  # seconds, and at most as often as this


@dataclass(frozen=True)
class Known:
    """A study as it was last looked at. `going` has the revision of each trial that may still change."""

    uid: str
    study_id: int
    report: Mapping[str, Any]
    made: int  # the version at which the report was
    whole: bool  # the report has all parts
    version: int
    count: int
    going: Mapping[int, int]
    stamps: Mapping[int, int] = field(default_factory=dict[int, int])
    ranked: int = 0  # the version at which places last changed


class LiveStudy:
    """One study by its name, whichever study has it. `look` and `message` may be called from any thread."""

    def __init__(self, ledger: Ledger, home: Home, name: str) -> None:
        self.name = name
        self._ledger, self._home = ledger, home
        self._known: Known | None = None
        self._last = 0  # the highest version there was
        self._due = 0.0
        self._looking, self._telling = threading.Lock(), threading.Lock()
        self._told: dict[tuple[int, int], Message] = {}

    @property
    def version(self) -> int:
        known = self._known
        return known.version if known else self._last

    @property
    def known(self) -> Known | None:
        """None before the first look, and where there is no study of the name."""
        return self._known

    def look(self) -> None:
        """Read what has changed, and make the report anew where that is due."""
        with self._looking:
            study = self._ledger.look(lambda connection: queries.find_study(connection, self.name))
            known = self._known
            if study is None:
                self._last += known is not None or not self._last
                self._known = None
            elif known is None or known.uid != study["uid"]:
                self._known = self._made(study, whole=False)
            else:
                self._known = self._looked(known, study)

    def _looked(self, known: Known, study: RowMapping) -> Known:
        def body(connection: Connection) -> tuple[list[Moved], str]:
            moved = live_queries.moved(connection, study["id"], known.count, sorted(known.going))
            return moved, queries.study_state(connection, study)

        moved, state = self._ledger.look(body)
        changed = [one for one in moved if known.going.get(one.number) != one.revision]
        ended = state != known.report["state"] and state != "running"
        if changed or state != known.report["state"]:
            known = self._stamped(known, moved, changed, state)
        behind = known.version > known.made or not known.whole
        if behind and (ended or not known.whole or time.monotonic() > self._due):
            return self._made(study, whole=True)
        return known

    def _stamped(self, known: Known, moved: list[Moved], changed: list[Moved], state: str) -> Known:
        self._last += 1
        return replace(
            known,
            report={**known.report, "state": state},
            version=self._last,
            count=max([known.count, *(one.number + 1 for one in moved)]),
            going=_going(moved),
            stamps={**known.stamps, **{one.number: self._last for one in changed}},
            ranked=self._last if any(one.state == "complete" for one in changed) else known.ranked,
        )

    def _made(self, study: RowMapping, *, whole: bool) -> Known:
        """The study with a report that is made now. What changes meanwhile is seen as a change of it."""
        begin = time.monotonic()
        moved = self._ledger.look(lambda connection: live_queries.moved(connection, study["id"], 0, []))
        report = data.read(self._ledger, self._home, self.name, quick=not whole).to_json()
        metrics = self._ledger.look(lambda connection: live_queries.reported(connection, study["id"]))
        report["curves"] = {**report["curves"], "known": sorted({*metrics, *report["curves"]["metrics"]})}
        end = time.monotonic()
        self._due = end + max(SOON, SHARE * (end - begin))
        self._last += 1
        return Known(
            study["uid"], study["id"], report, self._last, whole, self._last, len(moved), _going(moved), {}, self._last
        )

    def message(self, since: int | None) -> Message:
        """The trials that have changed since a version; a refresh where the report was made anew since."""
        known = self._known
        if known is None:
            return Message("gone", self._last)
        if since is None or not known.made <= since <= known.version:
            return Message("refresh", known.version)
        key = known.version, since
        with self._telling:  # one reads for all who lack the same
            if key not in self._told:
                others = {one: message for one, message in self._told.items() if one[0] == known.version}
                self._told = {**others, key: self._changes(known, since)}
            return self._told[key]

    def _changes(self, known: Known, since: int) -> Message:
        numbers = sorted(number for number, version in known.stamps.items() if version > since)

        def body(connection: Connection) -> dict[str, Any]:
            changes = data.changes(connection, known.report, numbers)
            if known.ranked > since:
                places = queries.places(connection, queries.study_row(connection, self.name))
                columns = [places.get(number, (None, None)) for number in range(known.count)]
                changes["places"] = {"front": [one[0] for one in columns], "place": [one[1] for one in columns]}
            return changes

        try:
            return Message("rows", known.version, self._ledger.look(body))
        except StudyError:  # it was deleted meanwhile
            return Message("gone", known.version)


def _going(moved: list[Moved]) -> dict[int, int]:
    return {one.number: one.revision for one in moved if one.state not in TERMINAL_STATES}
