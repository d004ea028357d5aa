"""Turns an imported trial into the ledger's rows."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence

from hpo.interchange.record import ImportedTrial, Point
from hpo.ledger.imports import Row
from hpo.ledger.json import plain
from hpo.ledger.names import MAX_METRIC
from hpo.space.hashing import json_sha256
from hpo.space.objective import Constraint, Objective

MAX_STEP = 2**31 - 1  # what a column of the ledger holds
FINAL = "final_step"  # in a record: the step at which the trial's values stand where its curves do not end with them
EPOCH = "epoch"  # a metric by this name counts epochs, as MLflow's runs of this platform have it too
EXACT, ATTRIBUTES = "exact", "attributes"


def row(
    trial: ImportedTrial, tool: str, objectives: Sequence[Objective], constraints: Sequence[Constraint], now: float
) -> Row:
    """The rows of a trial. A complete one whose values are not finite is infeasible, as one that was trained here would
    be, and so is one that was stopped before it had reported anything."""
    metrics = [one.metric for one in objectives]
    known = [at for at in (trial.ended, trial.started) if at is not None]
    started, ended = trial.started, known[0] if known else now
    curves = dict(usable_curves(trial.curves))
    final = _final(trial, metrics, curves)
    if final is not None:
        told = dict(zip(metrics, trial.values or (), strict=False)) | dict(trial.constraints)
        for metric, value in told.items():
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
    beyond = [trial.constraints.get(one.metric, math.nan) for one in constraints]
    columns = {"state": state, "outcome": outcome, "error": error or None, "step": last, "epoch": epoch_of(last)}
    columns |= {"values": judged, "violations": beyond if beyond and all(map(math.isfinite, beyond)) else None}
    columns |= {"started_at": started, "ended_at": ended}
    record = {EXACT: dict(trial.exact), ATTRIBUTES: dict(trial.attributes), FINAL: final}
    return Row(trial.key, columns, trial.params, json_sha256(plain(dict(trial.params))), values, stopped, record)


def usable_curves(curves: Mapping[str, Sequence[Point]]) -> Iterator[tuple[str, list[Point]]]:
    """The curves, one value a step, without what the ledger has no place for."""
    for metric, points in curves.items():
        kept = {point.step: point for point in points if 0 <= point.step <= MAX_STEP - 1}
        if kept and 0 < len(metric) <= MAX_METRIC:
            yield metric, [kept[step] for step in sorted(kept)]


def _epochs(curves: dict[str, list[Point]]) -> Callable[[int], int]:
    """Step -> the epoch that it closes: of a curve `epoch` of whole numbers, which is then none of the curves any more,
    the last one up to there, else the step itself."""
    points = curves.get(EPOCH, ())
    if not points or not all(point.value.is_integer() and 0 <= point.value <= MAX_STEP for point in points):
        return lambda step: step
    del curves[EPOCH]
    steps = [point.step for point in points]
    return lambda step: int(points[max(bisect_right(steps, step) - 1, 0)].value)


def _values(trial: ImportedTrial, metrics: Sequence[str], curves: Mapping[str, Sequence[Point]]) -> list[float] | None:
    """The trial's finite values; of one that was stopped without any, those that its curves end with."""
    ends = [curves[metric][-1].value for metric in metrics if curves.get(metric)]
    values = list(trial.values or (ends if trial.state == "pruned" and len(ends) == len(metrics) else ()))
    return values if values and all(map(math.isfinite, values)) else None


def _final(trial: ImportedTrial, metrics: Sequence[str], curves: Mapping[str, Sequence[Point]]) -> int | None:
    """The step after all curves, where the trial's values are to stand; None where the curves end with them already, or
    the trial has none."""
    if not trial.values:
        return None
    own = [curves.get(metric, ()) for metric in metrics]
    ends = [(points[-1].step, points[-1].value) if points else None for points in own]
    together = len({end[0] for end in ends if end}) == 1 and None not in ends
    if together and [end[1] for end in ends if end] == list(trial.values) and not trial.constraints:
        return None
    return max((points[-1].step + 1 for points in own if points), default=0)


def _end(trial: ImportedTrial, tool: str, reported: bool) -> tuple[str, str, str]:
    """State, outcome and error of the ended trial."""
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
