"""What mattered: how much each parameter explains, and the dimensions that were searched.

{
    "shares": {objective: {path: share}}   the largest first
    "lacking": {objective: str}            why there are none; else empty
    "caution": str                         where shares are taken from few trials; else empty
    "dimensions": {path: {"label": str, "kind": "number" or "choice", "log": bool, "whole": bool, "low", "high",
        "options", "ticks": all values of one that takes powers of two, else null}}
}
Shares are by PED-ANOVA (Watanabe et al. 2023, arXiv 2304.10255), as `hpo importance` has them. All is computed from
what the ledger has recorded: no declaration is loaded, so that a study is told as it was, also where its code has gone.
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
    from hpo.ledger import Ledger
    from hpo.storage.home import Home


LATER = "the shares are being computed"


def importances(ledger: Ledger, home: Home, of: Snapshot, *, shared: bool = True) -> dict[str, Any]:
    """Of each objective; on request without the shares, which take most of the time that a report takes."""
    described = descriptions(of)
    if not shared:
        lacking = dict.fromkeys(of.metrics, LATER)
        return {"shares": {}, "lacking": lacking, "caution": "", "dimensions": dimensions(described)}
    from hpo.analysis.plots import figures, importance
    from hpo.analysis.plots.optuna_study import to_optuna

    shares: dict[str, dict[str, float]] = {}
    lacking: dict[str, str] = {}
    caution = ""
    try:
        found = to_optuna(recorded(of, described), home.root, of.name, ledger.url, of.metrics[0])
    except HpoError as error:
        lacking = dict.fromkeys(of.metrics, reason(error))
    else:
        caution = importance.caution(found)
        for metric in of.metrics:
            subject = figures.subject(found, metric)
            lacking[metric] = importance.lacking_importances(subject.study, subject.loss)
            if not lacking[metric]:
                shares[metric] = importance.importances(subject.study, target=subject.loss)
    return {"shares": shares, "lacking": lacking, "caution": caution, "dimensions": dimensions(described)}


def descriptions(of: Snapshot) -> dict[str, Mapping[str, Any]]:
    """Path -> its dimension as `Dimension.describe` has it; of one the ledger has no space of, as values show it."""
    seen = dict.fromkeys(path for trial in of.trials for path in trial["params"])
    return {
        path: of.space.get(path) or _seen([t["params"][path] for t in of.trials if path in t["params"]])
        for path in [*of.space, *(path for path in seen if path not in of.space)]
    }


def _seen(values: Sequence[Any]) -> dict[str, Any]:
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        kind = "Int" if all(isinstance(value, int) for value in values) else "Float"
        return {"type": kind, "low": min(values), "high": max(values)}
    options = {json.dumps(value, sort_keys=True): value for value in values}
    return {"type": "Choice", "options": [options[text] for text in sorted(options)]}


def dimensions(described: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What a figure needs to know of each, by path."""
    labels, found = endings(described), dict[str, dict[str, Any]]()
    for path, one in described.items():
        log = bool(one.get("log") or one.get("powers_of_two"))
        kind = "choice" if "options" in one else "number"
        ends = {key: one.get(key) for key in ("low", "high", "options")}
        ticks = list(_rebuilt(one).extremes()) if one.get("powers_of_two") else None
        shown = {"label": labels[path], "kind": kind, "log": log, "whole": one["type"] == "Int", "ticks": ticks}
        found[path] = shown | ends
    return found


@dataclass(frozen=True)
class RecordedSpace:
    dimensions: Mapping[str, Dimension]


@dataclass(frozen=True)
class Recorded:
    """What the ledger has of a declaration that a study was searched by (hpo.analysis.plots.optuna_study.Searched)."""

    objectives: Sequence[Objective]
    constraints: Sequence[Constraint]
    space: RecordedSpace


def recorded(of: Snapshot, described: Mapping[str, Mapping[str, Any]]) -> Recorded:
    """The objectives, constraints and dimensions as the study was begun with them."""
    objectives = [Objective(**one) for one in of.objectives]
    constraints = [Constraint(**one) for one in of.spec.get("constraints", ())]
    return Recorded(objectives, constraints, RecordedSpace({path: _rebuilt(one) for path, one in described.items()}))


def _rebuilt(one: Mapping[str, Any]) -> Dimension:
    """The dimension without what it depends on: its values alone count."""
    if "options" in one:
        return Choice(one["options"])
    kind, fields = (Float, ("log", "step")) if one["type"] == "Float" else (Int, ("log", "step", "powers_of_two"))
    return kind(one["low"], one["high"], **{name: one[name] for name in fields if name in one})
