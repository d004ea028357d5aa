"""The learning curves of a report.

{
    "axis": "epoch" or "step"     what they go over: epochs, unless no report has closed one
    "metrics": [name]             objectives, what is held out beside them, losses
    "grids": [[int]]              what curves share: their points along the axis
    "lines": {name: {number: [grid, [float or null]]}}   null where a value was not finite
    "kept": int, "of": int        trials whose curves are here, and that have any
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

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection

MOST_CURVES = 1000  # the best quarter of them, the others spread over the study
MOST_METRICS = 4
MOST_POINTS = 100  # of a curve
_FIRST = 20  # trials that are asked what they report where none has been judged

X = TypeVar("X", int, float)
Points = list[tuple[int, int | None, float]]  # (step, epoch, value)


def curves(connection: Connection, of: Snapshot, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The curves of the metrics that matter most. Values are rounded to six significant digits.

    Of a part of the trials they are to be `like` those of all: of the same metrics, over the same axis.
    """
    metrics, numbers = (like["metrics"], [t["number"] for t in of.trials]) if like else (_metrics(connection, of), ())
    read: dict[str, dict[int, Points]] = {metric: {} for metric in metrics}
    found = queries.curves(connection, of.study["id"], metrics, numbers) if metrics else ()
    for number, key, step, epoch, value in found:
        read[key].setdefault(number, []).append((step, epoch, value))
    there = sorted({number for lines in read.values() for number in lines})
    by_epoch = like["axis"] == "epoch" if like else _by_epoch(read)
    kept, grids = (
        set(chosen(there, {number: place for number, (_, place) in of.placed.items()})),
        dict[tuple[int, ...], int](),
    )
    lines: dict[str, dict[int, list[Any]]] = {}
    thinned = False
    for metric, own in read.items():
        lines[metric] = {}
        for number in sorted(kept & own.keys()):
            points = list(_along(own[number], by_epoch))
            shown = thin(points)
            thinned |= len(shown) < len(points)
            grid = grids.setdefault(tuple(x for x, _ in shown), len(grids))
            lines[metric][number] = [grid, [rounded(value) for _, value in shown]]
    return {
        "axis": "epoch" if by_epoch else "step",
        "metrics": [metric for metric in metrics if lines[metric]],
        "grids": [list(grid) for grid in grids],
        "lines": {metric: own for metric, own in lines.items() if own},
        "kept": len(kept),
        "of": len(there),
        "thinned": thinned,
    }


def _by_epoch(read: Mapping[str, Mapping[int, Points]]) -> bool:
    return any(epoch is not None for lines in read.values() for line in lines.values() for _, epoch, _ in line)


def _metrics(connection: Connection, of: Snapshot) -> list[str]:
    known = {key for at in of.judged.values() for key in at.metrics}
    if not known:
        first = [trial["id"] for trial in of.trials[:_FIRST]]
        known = {key for found in queries.last_values(connection, first).values() for key in found}
    return headline(sorted(known | set(of.metrics)), of.metrics, of.spec["metrics"])[:MOST_METRICS]


def chosen(numbers: Sequence[int], places: Mapping[int, int], most: int = MOST_CURVES) -> list[int]:
    """At most so many trials: the best quarter of that number, the others evenly spread over those that are left."""
    if len(numbers) <= most:
        return list(numbers)
    ranked = sorted((n for n in numbers if n in places), key=lambda n: places[n])[: most // 4]
    best = set(ranked)
    rest = [number for number in numbers if number not in best]
    count = most - len(best)
    return sorted(best | {rest[i * len(rest) // count] for i in range(count)})


def _along(points: Points, by_epoch: bool) -> Iterator[tuple[int, float]]:
    """(place on the axis, value); by epochs without the reports in the middle of one."""
    for step, epoch, value in points:
        if not by_epoch or epoch is not None:
            yield (epoch if by_epoch and epoch is not None else step), value


def thin(points: Sequence[tuple[X, float]], most: int = MOST_POINTS) -> list[tuple[X, float]]:
    """At most so many of the points, with the first, the last, and of each stretch between them its extremes."""
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
    """To six significant digits; None where it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
