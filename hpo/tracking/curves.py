"""The curves of a study's own run: the best value so far, and the trials by the state they ended in.

Their step counts the trials in the order in which the sampler heard of their ends, which never changes: however many
workers there are, a point that is sent again is the same. How far the run has come is its tag `hpo.curves`, which is
sent with the points. It lies in the tracker, so a ledger that was taken back writes no step a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hpo.ledger import mirror_queries
from hpo.ledger.rows import Connection, RowMapping
from hpo.tracking.base import Point
from hpo.tracking.names import entry_name
from hpo.tracking.pages import objective_keys
from hpo.tracking.rows import milliseconds

MARK = "hpo.curves"
BEST, TRIALS = "best_so_far", "trials"


def best_keys(study: RowMapping) -> list[str]:
    """The metrics of the best value so far, one for each objective; MLflow shows those of a prefix together."""
    return [
        entry_name(f"{BEST}/{key.removeprefix('objective/')}") for key in objective_keys(study["spec"]["objectives"])
    ]


def points(connection: Connection, study: RowMapping, after: int = 0) -> list[Point]:
    """The points of the ends after the first `after`: of each the best value of every objective among the complete
    trials, and how many trials have ended in the state in which this one did."""
    choose = [max if one["direction"] == "maximize" else min for one in study["spec"]["objectives"]]
    best: list[float] | None = None
    counts: Counter[str] = Counter()
    found: list[Point] = []
    for place, state, values, ended_at in mirror_queries.told(connection, study["id"]):
        if state == "complete" and values and None not in values:
            best = values if best is None else [f(a, b) for f, a, b in zip(choose, best, values, strict=True)]
        counts[state] += 1
        if place < after:
            continue
        at = milliseconds(ended_at)
        found.append(Point(f"{TRIALS}/{state}", place + 1, at, float(counts[state])))
        found += [Point(key, place + 1, at, value) for key, value in zip(best_keys(study), best or (), strict=False)]
    return found


def mark(found: Sequence[Point], after: int = 0) -> dict[str, str]:
    """The tag of a run that has these points and those of the first `after` ends."""
    length = max((point.step for point in found), default=after)
    return {MARK: str(length)} if length else {}


def marked(tags: Mapping[str, str]) -> int:
    """The ends that a run of these tags shows."""
    return int(tags.get(MARK, 0))
