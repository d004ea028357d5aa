"""Finds the runs that show what the ledger does not know: it has been taken back, by a damaged WAL or a backup.

A run carries a mark of the ledger's revision that it shows and of when that was written. A trial that went on from an
earlier revision has written other rows since, and a run that is sent both would show some steps twice.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpo.ledger import mirror_queries
from hpo.ledger.rows import Connection, RowMapping
from hpo.space.trial_state import TERMINAL_STATES
from hpo.tracking.base import RunView
from hpo.tracking.rows import milliseconds

MARK = "hpo.ledger"


def mark(trial: RowMapping, last: float | None) -> str:
    """Of a run that shows all of a trial: its revision, and when it was asked, last reported and ended."""
    ended = trial["ended_at"] if trial["state"] in TERMINAL_STATES else None
    times = (trial["created_at"], last, ended)
    return " ".join([str(trial["revision"]), *("-" if at is None else str(milliseconds(at)) for at in times)])


def ahead(connection: Connection, study: RowMapping, views: Iterable[RunView]) -> dict[str, int]:
    """Run id -> trial number of the runs that show what the ledger does not know. Those of earlier releases, which
    carry no mark, are not judged."""
    known = {row["number"]: row for row in mirror_queries.all_trials(connection, study["id"])}
    numbers = {view.run_id: int(view.uid.rpartition("/")[2]) for view in views if MARK in view.tags}
    return {
        view.run_id: numbers[view.run_id]
        for view in views
        if view.run_id in numbers and _is_ahead(connection, view.tags[MARK], known.get(numbers[view.run_id]))
    }


def _is_ahead(connection: Connection, shown: str, trial: RowMapping | None) -> bool:
    revision, asked, reported, ended = shown.split(" ")
    if trial is None or int(revision) > trial["revision"]:
        return True
    last = mirror_queries.last_report(connection, trial["id"], int(revision))
    _, *now = mark(trial, last).split(" ")
    return [asked, reported] != now[:2] or ended not in ("-", now[2])
