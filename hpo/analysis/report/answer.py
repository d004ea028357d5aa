"""The answer of a report: which configuration is best, what it is worth, and how to train it.

{
    "best": [trial]      the best one, or of several objectives the front, at most MOST of it
    "front": int         how many there are
    "lacking": str       why there is none; else empty
    "again": str         the command that shows one of a front in full; empty where there is one best
    "promoted": [{"trial": int, "label": str}]   versions of registered models that trials were promoted to
}
A trial is {"number", "values", "held_out": {objective: value}, "held_out_as": {objective: metric}, "params", "epoch",
"judged_epoch", "beside": {metric: value}, "checkpoint", "checkpoint_at": its epoch and values in words, "imported":
bool, "train": the command that trains it, or that searches on from an imported one}.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpo.analysis.report.snapshot import Snapshot, reason
from hpo.analysis.report.trials import finite
from hpo.analysis.results import best as bests
from hpo.analysis.results.trial import of_checkpoint
from hpo.errors import HpoError
from hpo.ledger.promotions import standing
from hpo.text import command

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection
    from hpo.storage.home import Home

MOST = 20


def answer(connection: Connection, home: Home, of: Snapshot) -> dict[str, Any]:
    """As `hpo best` has it."""
    front = sum(front == 0 for front, _ in of.placed.values()) if len(of.metrics) > 1 else min(len(of.placed), 1)
    try:
        found = bests.best_trials(connection, home, of.name, MOST)
    except HpoError as error:
        return {"best": [], "front": 0, "lacking": reason(error), "again": "", "promoted": []}
    again = command(f"best --study {of.name} --trial {found[0]['number']}") if front > 1 else ""
    promoted = [{"trial": one.trial, "label": one.label} for one in standing(connection, of.study["id"])]
    best = [_best(of, one) for one in found]
    return {"best": best, "front": front, "lacking": "", "again": again, "promoted": promoted}


def _best(of: Snapshot, found: dict[str, Any]) -> dict[str, Any]:
    judged = found["judged"] or {"epoch": None, "metrics": {}}
    return {
        **{key: found[key] for key in ("number", "params", "epoch", "beside", "checkpoint")},
        "values": {metric: finite(value) for metric, value in found["values"].items()},
        "held_out": {metric: judged["metrics"].get(held) for metric, held in of.hold_outs.items()},
        "held_out_as": of.hold_outs,
        "judged_epoch": judged["epoch"],
        "checkpoint_at": of_checkpoint(found["checkpoint_at"], bests.precise) if found["checkpoint"] else "",
        "train": bests.train_command(found),
        "imported": bests.imported(found),
    }
