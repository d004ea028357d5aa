"""Builds the learning curves of a report.

{
    "axis": "epoch" or "step"     the x axis: epochs, unless no report has closed one
    "metrics": [name]             objectives, metrics held out beside them, losses
    "grids": [[int]]              positions on the axis, which curves share
    "lines": {name: {number: [grid, [float or null]]}}   null where a value was not finite
    "kept": int, "of": int        trials whose curves are here, and trials that have any
    "thinned": bool               whether long curves have lost points, never their ends and extremes
}
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hpo.analysis.report.snapshot import Snapshot
from hpo.analysis.results.compare import headline
from hpo.ledger import queries
from hpo.ledger.views import report as report_queries

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection

MOST_CURVES = 1000  # a quarter from the best trials, the others spread over the study
MOST_METRICS = 4
MOST_POINTS = 100  # points of a curve
_FIRST = 20  # trials whose metrics are read if none has been judged

X = TypeVar("X", int, float)
Points = list[tuple[int, int | None, float]]  # (step, epoch, value)


def curves(connection: Connection, of: Snapshot, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the curves of the most important metrics, with values rounded to six significant digits.

    For a part of the trials `like` holds the curves of all; the part uses the same metrics and the same axis.
    """
    metrics = like["metrics"] if like else _metrics(connection, of)
    reported = report_queries.reported(connection, of.study.id, metrics, [t.number for t in of.trials] if like else ())
    with_curves = [trial.number for trial in of.trials if trial.id in reported]
    by_epoch = like["axis"] == "epoch" if like else report_queries.by_epoch(connection, of.study.id, metrics)
    kept = chosen(with_curves, {number: rank for number, (_, rank) in of.placed.items()})
    read: dict[str, dict[int, Points]] = {metric: {} for metric in metrics}
    for number, key, step, epoch, value in queries.curves(connection, of.study.id, metrics, kept) if kept else ():
        read[key].setdefault(number, []).append((step, epoch, value))
    grids: dict[tuple[int, ...], int] = {}
    lines: dict[str, dict[int, list[Any]]] = {}
    thinned = False
    for metric, by_trial in read.items():
        lines[metric] = {}
        for number, reports in by_trial.items():
            points = list(_along(reports, by_epoch))
            shown = thin(points)
            thinned |= len(shown) < len(points)
            grid = grids.setdefault(tuple(x for x, _ in shown), len(grids))
            lines[metric][number] = [grid, [rounded(value) for _, value in shown]]
    return {
        "axis": "epoch" if by_epoch else "step",
        "metrics": [metric for metric in metrics if lines[metric]],
        "grids": [list(grid) for grid in grids],
        "lines": {metric: by_trial for metric, by_trial in lines.items() if by_trial},
        "kept": len(kept),
        "of": len(with_curves),
        "thinned": thinned,
    }


def _metrics(connection: Connection, of: Snapshot) -> list[str]:
    known = {key for at in of.judged.values() for key in at.metrics}
    if not known:
        first = [trial.id for trial in of.trials[:_FIRST]]
        known = {key for values in queries.last_values(connection, first).values() for key in values}
    return headline(sorted(known | set(of.metrics)), of.metrics, of.spec.metrics)[:MOST_METRICS]


def chosen(numbers: Sequence[int], ranks: Mapping[int, int], most: int = MOST_CURVES) -> list[int]:
    """Returns at most `most` trials: a quarter of that number from the best, the others spread evenly over the rest."""
    if len(numbers) <= most:
        return list(numbers)
    ranked = sorted((n for n in numbers if n in ranks), key=lambda n: ranks[n])[: most // 4]
    best = set(ranked)
    rest = [number for number in numbers if number not in best]
    count = most - len(best)
    return sorted(best | {rest[i * len(rest) // count] for i in range(count)})


def _along(points: Points, by_epoch: bool) -> Iterator[tuple[int, float]]:
    """Yields (position on the axis, value), by epochs without the reports inside an epoch."""
    for step, epoch, value in points:
        if not by_epoch or epoch is not None:
            yield (epoch if by_epoch and epoch is not None else step), value


def thin(points: Sequence[tuple[X, float]], most: int = MOST_POINTS) -> list[tuple[X, float]]:
    """Returns at most `most` of the points: the first, the last, and the extremes of each stretch between them."""
    if len(points) <= most:
        return list(points)
    inner, stretches = points[1:-1], (most - 2) // 2
    kept: list[tuple[X, float]] = [points[0]]
    for i in range(stretches):
        stretch = inner[i * len(inner) // stretches : (i + 1) * len(inner) // stretches]
        finite = [point for point in stretch if math.isfinite(point[1])] or stretch
        kept += sorted({min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])})
    return [*kept, points[-1]]


def rounded(value: float) -> float | None:
    """Returns a value rounded to six significant digits; None if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
