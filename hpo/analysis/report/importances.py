"""What mattered: how much each parameter explains, and the dimensions that were searched.

{
    "shares": {objective: {path: share}}   the largest first
    "lacking": {objective: str}            why there are none; else empty
    "few": int                             complete trials below which shares still move much
    "dimensions": {path: {"label": str, "kind": "number" or "choice", "log": bool, "whole": bool, "low", "high",
        "options", "ticks": all values of one that takes powers of two, else null}}
}
Shares are by PED-ANOVA (Watanabe et al. 2023, arXiv 2304.10255), as `hpo importance` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpo.analysis.report.snapshot import Snapshot, reason
from hpo.errors import HpoError
from hpo.text import endings

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.storage.home import Home


def importances(ledger: Ledger, home: Home, of: Snapshot) -> dict[str, Any]:
    """Of each objective. Loads the declaration, which says how the ranges are scaled."""
    from hpo.analysis.models.checkpoints import declared
    from hpo.analysis.plots import figures, importance
    from hpo.analysis.plots.optuna_study import to_optuna

    shares: dict[str, dict[str, float]] = {}
    lacking: dict[str, str] = {}
    try:
        with ledger.read() as connection:
            study = declared(connection, of.name)
        found = to_optuna(study, home.root, of.name, ledger.url, of.metrics[0])
    except HpoError as error:
        lacking = dict.fromkeys(of.metrics, reason(error))
    else:
        for metric in of.metrics:
            subject = figures.subject(found, metric)
            lacking[metric] = importance.lacking_importances(subject.study, subject.loss)
            if not lacking[metric]:
                shares[metric] = importance.importances(subject.study, target=subject.loss)
    return {"shares": shares, "lacking": lacking, "few": importance.FEW, "dimensions": dimensions(of)}


def dimensions(of: Snapshot) -> dict[str, dict[str, Any]]:
    """By path; of a study that the ledger has no space of as its trials' values show them."""
    searched = dict.fromkeys([*of.space, *(path for trial in of.trials for path in trial["params"])])
    labels = endings(searched)
    found: dict[str, dict[str, Any]] = {}
    for path in searched:
        one = of.space.get(path) or _seen([t["params"][path] for t in of.trials if path in t["params"]])
        log = bool(one.get("log") or one.get("powers_of_two"))
        kind = "choice" if "options" in one else "number"
        ends = {key: one.get(key) for key in ("low", "high", "options")}
        ticks = _powers(one["low"], one["high"]) if one.get("powers_of_two") else None
        shown = {"label": labels[path], "kind": kind, "log": log, "whole": one.get("type") == "Int", "ticks": ticks}
        found[path] = shown | ends
    return found


def _powers(low: int, high: int) -> list[int]:
    return [1 << exponent for exponent in range(low.bit_length() - 1, high.bit_length())]


def _seen(values: Sequence[Any]) -> dict[str, Any]:
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return {"low": min(values), "high": max(values)}
    return {"options": sorted({str(value) for value in values})}
