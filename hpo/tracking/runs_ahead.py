"""Finds the runs that show data unknown to the ledger, because a damaged WAL or a backup reset the ledger to an earlier
state.

Each run carries a mark: the ledger's revision that it shows and when that revision was written. A trial that continued
from an earlier revision has written other rows since, so a run that received both would show some steps twice.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpo.ledger.rows import Connection, StudyRow, TrialRow
from hpo.ledger.views import mirror as mirror_queries
from hpo.space.trial_state import TERMINAL_STATES
from hpo.tracking.base import RunView
from hpo.tracking.rows import milliseconds

MARK = "hpo.ledger"


def mark(trial: TrialRow, last: float | None) -> str:
    """Returns the mark of a run that shows all of a trial: its revision, and the times of its ask, last report and
    end."""
    ended_at = trial.ended_at if trial.state in TERMINAL_STATES else None
    times = (trial.created_at, last, ended_at)
    return " ".join([str(trial.revision), *("-" if at is None else str(milliseconds(at)) for at in times)])


def ahead(connection: Connection, study: StudyRow, views: Iterable[RunView]) -> dict[str, int]:
    """Returns run id -> trial number of the runs that show data unknown to the ledger.

    Runs of earlier releases carry no mark and are skipped.
    """
    known = {row.number: row for row in mirror_queries.all_trials(connection, study.id)}
    numbers = {view.run_id: int(view.uid.rpartition("/")[2]) for view in views if MARK in view.tags}
    return {
        view.run_id: numbers[view.run_id]
        for view in views
        if view.run_id in numbers and _is_ahead(connection, view.tags[MARK], known.get(numbers[view.run_id]))
    }


def _is_ahead(connection: Connection, shown: str, trial: TrialRow | None) -> bool:
    revision, restarts, reported, ended = shown.split(" ")
    if trial is None or int(revision) > trial.revision:
        return True
    last = mirror_queries.last_report(connection, trial.id, int(revision))
    _, *now = mark(trial, last).split(" ")
    return [restarts, reported] != now[:2] or ended not in ("-", now[2])
