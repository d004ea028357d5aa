"""Computes how much each parameter explains, and describes the dimensions that were searched.

{
    "shares": {objective: {path: share}}   the largest first
    "lacking": {objective: str}            why there are none; else empty
    "caution": str                         a warning if shares rest on few trials; else empty
    "dimensions": {path: {"label": str, "kind": "number" or "choice", "log": bool, "whole": bool, "low", "high",
        "options", "ticks": all values of a dimension of powers of two, else null}}
}
Shares are by PED-ANOVA (Watanabe et al. 2023, arXiv 2304.10255), as in `hpo importance`. Everything is computed from
the ledger's records: no declaration is loaded, so the report shows the study as it was, even if its code is gone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.analysis.report.snapshot import Snapshot, reason
from hpo.errors import HpoError
from hpo.space.dimension import Dimension
from hpo.space.dimensions import Choice, Float, Int
from hpo.space.objective import Constraint, Objective
from hpo.text import endings

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection


LATER = "the shares are being computed"


def importances(connection: Connection, of: Snapshot, *, shared: bool = True) -> dict[str, Any]:
    """Returns the importances for each objective, or without `shared` only the dimensions.

    The shares need Optuna, whose import takes a second.
    """
    described = descriptions(of)
    if not shared:
        lacking = dict.fromkeys(of.metrics, LATER)
        return {"shares": {}, "lacking": lacking, "caution": "", "dimensions": dimensions(described)}
    from hpo.analysis.plots import figures, importance
    from hpo.analysis.plots.optuna_study import complete_trials

    shares: dict[str, dict[str, float]] = {}
    lacking: dict[str, str] = {}
    caution = ""
    try:
        study = complete_trials(connection, recorded(of, described), of.name, of.trials)
    except HpoError as error:
        lacking = dict.fromkeys(of.metrics, reason(error))
    else:
        caution = importance.caution(study)
        for metric in of.metrics:
            subject = figures.subject(study, metric)
            lacking[metric] = importance.lacking_importances(subject.study, subject.loss)
            if not lacking[metric]:
                shares[metric] = importance.importances(subject.study, target=subject.loss)
    return {"shares": shares, "lacking": lacking, "caution": caution, "dimensions": dimensions(described)}


def descriptions(of: Snapshot) -> dict[str, Mapping[str, Any]]:
    """Returns path -> its dimension as in `Dimension.describe`, derived from the values if the ledger has no space."""
    seen = dict.fromkeys(path for trial in of.trials for path in trial.params)
    return {
        path: of.space.get(path) or _seen([t.params[path] for t in of.trials if path in t.params])
        for path in [*of.space, *(path for path in seen if path not in of.space)]
    }


def _seen(values: Sequence[Any]) -> dict[str, Any]:
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        kind = "Int" if all(isinstance(value, int) for value in values) else "Float"
        return {"type": kind, "low": min(values), "high": max(values)}
    options = {json.dumps(value, sort_keys=True): value for value in values}
    return {"type": "Choice", "options": [options[text] for text in sorted(options)]}


def dimensions(described: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, Any]]:
    """Returns the data that a figure needs about each dimension, by path."""
    labels, by_path = endings(described), dict[str, dict[str, Any]]()
    for path, dimension in described.items():
        log = bool(dimension.get("log") or dimension.get("powers_of_two"))
        kind = "choice" if "options" in dimension else "number"
        ends = {key: dimension.get(key) for key in ("low", "high", "options")}
        ticks = list(_rebuilt(dimension).extremes()) if dimension.get("powers_of_two") else None
        shown = {"label": labels[path], "kind": kind, "log": log, "whole": dimension["type"] == "Int", "ticks": ticks}
        by_path[path] = shown | ends
    return by_path


@dataclass(frozen=True)
class RecordedSpace:
    dimensions: Mapping[str, Dimension]


@dataclass(frozen=True)
class Recorded:
    """The ledger's record of the declaration by which a study was searched
    (hpo.analysis.plots.optuna_study.Searched)."""

    objectives: Sequence[Objective]
    constraints: Sequence[Constraint]
    space: RecordedSpace


def recorded(of: Snapshot, described: Mapping[str, Mapping[str, object]]) -> Recorded:
    """Returns the objectives, constraints and dimensions that the study began with."""
    objectives = [Objective(**objective) for objective in of.objectives]
    constraints = [Constraint(**constraint) for constraint in of.spec.constraints]
    space = RecordedSpace({path: _rebuilt(dimension) for path, dimension in described.items()})
    return Recorded(objectives, constraints, space)


def _rebuilt(dimension: Mapping[str, Any]) -> Dimension:
    """Returns the dimension without its condition, because only its values count."""
    if "options" in dimension:
        return Choice(dimension["options"])
    kind, fields = (Float, ("log", "step")) if dimension["type"] == "Float" else (Int, ("log", "step", "powers_of_two"))
    return kind(dimension["low"], dimension["high"], **{name: dimension[name] for name in fields if name in dimension})
