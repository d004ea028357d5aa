"""Converts an imported trial into the ledger's rows."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence

from hpo.interchange.record import ImportedTrial, Point
from hpo.ledger.database.json import plain
from hpo.ledger.imports import Row
from hpo.ledger.names import MAX_METRIC
from hpo.space.hashing import json_sha256
from hpo.space.objective import Constraint, Objective

MAX_STEP = 2**31 - 1  # the largest value of the ledger's column
FINAL = "final_step"  # in a record: the step of the trial's values, if its curves do not end with them
EPOCH = "epoch"  # a metric of this name counts epochs, as in this platform's MLflow runs
EXACT, ATTRIBUTES = "exact", "attributes"


def row(
    trial: ImportedTrial, tool: str, objectives: Sequence[Objective], constraints: Sequence[Constraint], now: float
) -> Row:
    """Returns the rows of a trial.

    A complete trial with values that are not finite is infeasible, as if trained here; so is one that was stopped
    before its first report.
    """
    metrics = [objective.metric for objective in objectives]
    known = [at for at in (trial.ended, trial.started) if at is not None]
    started, ended = trial.started, known[0] if known else now
    curves = dict(usable_curves(trial.curves))
    final = _final(trial, metrics, curves)
    if final is not None:
        final_values = dict(zip(metrics, trial.values or (), strict=False)) | dict(trial.constraints)
        for metric, value in final_values.items():
            curves.setdefault(metric, [])
            curves[metric] = [*curves[metric], Point(final, value)]
    epoch_of = _epochs(curves)
    values = [
        (point.step, epoch_of(point.step), metric, point.value, ended if point.at is None else point.at)
        for metric, points in curves.items()
        for point in points
    ]
    last = max((step for step, *_ in values), default=0)
    state, outcome, error = _end(trial, tool, bool(values))
    stopped = f"{tool} stopped it{f': {trial.error}' if trial.error else ''}" if state == "pruned" else ""
    judged = _values(trial, metrics, curves) if state != "failed" else None
    beyond = [trial.constraints.get(constraint.metric, math.nan) for constraint in constraints]
    columns = {"state": state, "outcome": outcome, "error": error or None, "step": last, "epoch": epoch_of(last)}
    columns |= {"values": judged, "violations": beyond if beyond and all(map(math.isfinite, beyond)) else None}
    columns |= {"started_at": started, "ended_at": ended}
    record = {EXACT: dict(trial.exact), ATTRIBUTES: dict(trial.attributes), FINAL: final}
    return Row(trial.key, columns, trial.params, json_sha256(plain(dict(trial.params))), values, stopped, record)


def usable_curves(curves: Mapping[str, Sequence[Point]]) -> Iterator[tuple[str, list[Point]]]:
    """Yields the curves that the ledger can hold, with one value a step."""
    for metric, points in curves.items():
        kept = {point.step: point for point in points if 0 <= point.step <= MAX_STEP - 1}
        if kept and 0 < len(metric) <= MAX_METRIC:
            yield metric, [kept[step] for step in sorted(kept)]


def _epochs(curves: dict[str, list[Point]]) -> Callable[[int], int]:
    """Returns a function from a step to the epoch that it closes.

    If there is a curve `epoch` of whole numbers, its last value up to the step is the epoch, and the curve is removed
    from `curves`. Otherwise the step itself is the epoch.
    """
    points = curves.get(EPOCH, ())
    if not points or not all(point.value.is_integer() and 0 <= point.value <= MAX_STEP for point in points):
        return lambda step: step
    del curves[EPOCH]
    steps = [point.step for point in points]
    return lambda step: int(points[max(bisect_right(steps, step) - 1, 0)].value)


def _values(trial: ImportedTrial, metrics: Sequence[str], curves: Mapping[str, Sequence[Point]]) -> list[float] | None:
    """Returns the trial's finite values; a stopped trial without values gets the last ones of its curves."""
    ends = [curves[metric][-1].value for metric in metrics if curves.get(metric)]
    values = list(trial.values or (ends if trial.state == "pruned" and len(ends) == len(metrics) else ()))
    return values if values and all(map(math.isfinite, values)) else None


def _final(trial: ImportedTrial, metrics: Sequence[str], curves: Mapping[str, Sequence[Point]]) -> int | None:
    """Returns the step after all curves, at which the trial's values are written.

    None if the curves already end with the values, or the trial has none.
    """
    if not trial.values:
        return None
    judged = [curves.get(metric, ()) for metric in metrics]
    ends = [(points[-1].step, points[-1].value) if points else None for points in judged]
    together = len({end[0] for end in ends if end}) == 1 and None not in ends
    if together and [end[1] for end in ends if end] == list(trial.values) and not trial.constraints:
        return None
    return max((points[-1].step + 1 for points in judged if points), default=0)


def _end(trial: ImportedTrial, tool: str, reported: bool) -> tuple[str, str, str]:
    """Returns state, outcome and error of the ended trial."""
    if trial.state == "failed":
        return "failed", "user_error", trial.error or f"it failed in {tool}"
    if trial.values and not all(map(math.isfinite, trial.values)):
        return "infeasible", "nonfinite", f"its values {list(trial.values)} are not finite"
    broken = [f"{name} is {value:g}, above 0" for name, value in trial.constraints.items() if not value <= 0]
    if broken and trial.state == "complete":
        return "infeasible", "infeasible", f"{'; '.join(broken)}."
    if trial.state == "pruned" and not reported:
        return "infeasible", "pruned", trial.error or f"{tool} stopped it before it had reported anything"
    return trial.state, trial.state, trial.error if trial.state == "infeasible" else ""
