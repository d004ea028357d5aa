"""Follows a study: its report, rebuilt from time to time, and the trials that have changed since.

Each change has a version. A trial is stamped with the version of its last change, so a listener with version v lacks
the trials stamped above v. These are read again, whole, and sent as their part of a report. So no listener needs a
queue, and a message that arrives twice changes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpo.analysis.report import data
from hpo.analysis.results.compare import headline
from hpo.analysis.serve.subjects import Message
from hpo.errors import StudyError
from hpo.ledger import queries
from hpo.ledger import removed as removed_trials
from hpo.ledger.names import machine_dependent
from hpo.ledger.rows import StudyRow
from hpo.ledger.views import live as live_queries
from hpo.space.trial_state import TERMINAL_STATES

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.ledger.rows import Connection
    from hpo.ledger.views.live import Moved
    from hpo.storage.home import Home

SHARE = 20  # least pause between two reports, in durations of making one
SOON = 3.0  # least pause between two reports, in seconds


@dataclass(frozen=True)
class Known:
    """A study as last read. `going` has the revision of each trial that may still change."""

    uid: str
    study_id: int
    report: Mapping[str, Any]
    made: int  # the version of the report
    whole: bool  # the report has all parts
    version: int
    count: int
    going: Mapping[int, int]
    stamps: Mapping[int, int] = field(default_factory=dict[int, int])
    ranked: int = 0  # the version at which places last changed
    removed: int = 0  # how many trials `hpo rm` had removed


class LiveStudy:
    """Follows whichever study has a name. `look` and `message` may be called from any thread."""

    def __init__(self, ledger: Ledger, home: Home, name: str) -> None:
        self.name = name
        self._ledger, self._home = ledger, home
        self._known: Known | None = None
        self._last = 0  # the highest version so far
        self._due = 0.0
        self._looking, self._telling = threading.Lock(), threading.Lock()
        self._told: dict[tuple[int, int], Message] = {}

    @property
    def version(self) -> int:
        known = self._known
        return known.version if known else self._last

    @property
    def known(self) -> Known | None:
        """Returns the study as last read; None before the first look, and if no study has the name."""
        return self._known

    def look(self) -> None:
        """Reads the changes, and rebuilds the report if that is due."""
        with self._looking:
            study = self._ledger.look(lambda connection: queries.find_study(connection, self.name))
            known = self._known
            if study is None:
                self._last += known is not None or not self._last
                self._known = None
            elif known is None or known.uid != study.uid:
                self._known = self._made(study, whole=False)
            else:
                self._known = self._looked(known, study)

    def _looked(self, known: Known, study: StudyRow) -> Known:
        def body(connection: Connection) -> tuple[list[Moved], str, int]:
            moved = live_queries.moved(connection, study.id, known.count, sorted(known.going))
            return moved, queries.study_state(connection, study), len(removed_trials.numbers(connection, study.id))

        moved, state, removed = self._ledger.look(body)
        if removed != known.removed:
            return self._made(study, whole=known.whole)
        changed = [trial for trial in moved if known.going.get(trial.number) != trial.revision]
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
            count=max([known.count, *(trial.number + 1 for trial in moved)]),
            going=_going(moved),
            stamps={**known.stamps, **{trial.number: self._last for trial in changed}},
            ranked=self._last if any(trial.state == "complete" for trial in changed) else known.ranked,
        )

    def _made(self, study: StudyRow, *, whole: bool) -> Known:
        """Returns the study with a new report. A change during the reading counts as a change after it."""
        begin = time.monotonic()
        moved = self._ledger.look(lambda connection: live_queries.moved(connection, study.id, 0, []))
        removed = self._ledger.look(lambda connection: len(removed_trials.numbers(connection, study.id)))
        report = data.read(self._ledger, self._home, self.name, quick=not whole).to_json()
        metrics = self._ledger.look(lambda connection: live_queries.reported(connection, study.id))
        ranked = headline(
            sorted({*metrics, *report["curves"]["metrics"]}), list(report["trials"]["values"]), every=True
        )
        report["curves"] = {**report["curves"], "known": sorted(ranked, key=machine_dependent)}
        end = time.monotonic()
        self._due = end + max(SOON, SHARE * (end - begin))
        self._last += 1
        return Known(
            study.uid,
            study.id,
            report,
            self._last,
            whole,
            self._last,
            max((trial.number + 1 for trial in moved), default=0),
            _going(moved),
            ranked=self._last,
            removed=removed,
        )

    def message(self, since: int | None) -> Message:
        """Returns the trials that have changed since a version, or a refresh if the report was rebuilt since."""
        known = self._known
        if known is None:
            return Message("gone", self._last)
        if since is None or not known.made <= since <= known.version:
            return Message("refresh", known.version)
        key = known.version, since
        with self._telling:  # one read serves all listeners with the same version
            if key not in self._told:
                others = {versions: message for versions, message in self._told.items() if versions[0] == known.version}
                self._told = {**others, key: self._changes(known, since)}
            return self._told[key]

    def _changes(self, known: Known, since: int) -> Message:
        numbers = sorted(number for number, version in known.stamps.items() if version > since)

        def body(connection: Connection) -> dict[str, Any]:
            changes = data.changes(connection, known.report, numbers)
            if known.ranked > since:
                ranks = queries.ranks(connection, queries.study_row(connection, self.name))
                columns = [ranks.get(number, (None, None)) for number in range(known.count)]
                changes["places"] = {"front": [front for front, _ in columns], "place": [rank for _, rank in columns]}
            return changes

        try:
            return Message("rows", known.version, self._ledger.look(body))
        except StudyError:  # the study was deleted meanwhile
            return Message("gone", known.version)


def _going(moved: list[Moved]) -> dict[int, int]:
    return {trial.number: trial.revision for trial in moved if trial.state not in TERMINAL_STATES}
