"""Computes the curves of a study's own run: the best value so far, and the number of trials by their final state.

A step counts the ended trials in the order of tells. That order never changes, so a point that is sent again is the
same, whatever the number of workers. The tag `hpo.curves` records the progress of the run. It is sent with the points
and stored in the tracker, so a ledger that was reset to an earlier state writes no step twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hpo.ledger.rows import Connection, StudyRow
from hpo.ledger.views import mirror as mirror_queries
from hpo.tracking.base import Point
from hpo.tracking.names import entry_name
from hpo.tracking.pages import objective_keys
from hpo.tracking.rows import milliseconds

MARK = "hpo.curves"
BEST, TRIALS = "best_so_far", "trials"


def best_keys(study: StudyRow) -> list[str]:
    """Returns the metrics of the best value so far, one for each objective; MLflow groups metrics that share a
    prefix."""
    return [entry_name(f"{BEST}/{key.removeprefix('objective/')}") for key in objective_keys(study.spec.objectives)]


def points(connection: Connection, study: StudyRow, after: int = 0) -> list[Point]:
    """Returns the points for all ends but the first `after`.

    Each end has the best value of every objective among the complete trials, and the number of trials that have ended
    in the same state as this one.
    """
    choose = [max if objective["direction"] == "maximize" else min for objective in study.spec.objectives]
    best: list[float] | None = None
    counts: Counter[str] = Counter()
    curve: list[Point] = []
    for position, state, values, ended_at in mirror_queries.told(connection, study.id):
        if state == "complete" and values and None not in values:  # pyright: ignore[reportUnnecessaryContains]
            best = values if best is None else [f(a, b) for f, a, b in zip(choose, best, values, strict=True)]
        counts[state] += 1
        if position < after:
            continue
        at = milliseconds(ended_at)
        curve.append(Point(f"{TRIALS}/{state}", position + 1, at, float(counts[state])))
        curve += [Point(key, position + 1, at, value) for key, value in zip(best_keys(study), best or (), strict=False)]
    return curve


def mark(found: Sequence[Point], after: int = 0) -> dict[str, str]:
    """Returns the tag for a run that has these points and those of the first `after` ends."""
    length = max((point.step for point in found), default=after)
    return {MARK: str(length)} if length else {}


def marked(tags: Mapping[str, str]) -> int:
    """Returns how many ends a run with these tags shows."""
    return int(tags.get(MARK, 0))
