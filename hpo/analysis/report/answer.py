"""Computes the answer of a report: the best configuration, its values, and how to train it.

{
    "best": [trial]      the best trial or, with several objectives, the front, at most MOST of it
    "front": int         how many there are
    "lacking": str       why there is none; else empty
    "again": str         the command that shows one of a front in full; empty if there is a single best
    "promoted": [{"trial": int, "label": str}]   versions of registered models that trials were promoted to
    "seeds": bool        whether these are the best by their means under other seeds, from `hpo confirm`
    "extended": [str]    a line for each trial that `hpo extend` has trained on
    "stopped_ahead": str the stopped trials that stood better than the best, and what finishes them; empty for none
}
A trial is {"number", "values", "held_out": {objective: value}, "held_out_as": {objective: metric}, "params", "epoch",
"judged_epoch", "beside": {metric: value}, "checkpoint", "checkpoint_at": its epoch and values in words, "imported":
bool, "train": the command that trains it, or that searches on from an imported one, "means": {objective: value under
other seeds} or null, "instead": [a line about its result under other seeds],
"expected": [a line about its value on new data, or on a runner-up that may be as good, before other seeds confirm it]}.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpo.analysis.report.snapshot import Snapshot, reason
from hpo.analysis.report.trials import finite
from hpo.analysis.results import best as bests
from hpo.analysis.results import stopped
from hpo.analysis.results.extended import Extension
from hpo.analysis.results.trial import of_checkpoint
from hpo.errors import HpoError
from hpo.ledger.promotions import standing
from hpo.text import command

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection
    from hpo.storage.home import Home

MOST = 20


def answer(connection: Connection, home: Home, of: Snapshot) -> dict[str, Any]:
    """Returns the answer, with the content of `hpo best`."""
    front = sum(front == 0 for front, _ in of.placed.values()) if len(of.metrics) > 1 else min(len(of.placed), 1)
    try:
        trials = bests.best_trials(connection, home, of.name, MOST)
    except HpoError as error:
        empty = {"best": [], "front": 0, "again": "", "promoted": [], "seeds": False, "extended": []}
        ahead = stopped.stopped_ahead(connection, of.study)
        return empty | {"lacking": reason(error), "stopped_ahead": stopped.line(ahead, of.name)}
    seeds = trials[0]["seeds"] is not None
    front = len(trials) if seeds else front
    shows_best = command(f"best --study {of.name} --trial {trials[0]['number']}") if front > 1 else ""
    promoted = [{"trial": row.trial, "label": row.label} for row in standing(connection, of.study.id)]
    best = [_best(of, trial) for trial in trials]
    shown = {"best": best, "front": front, "lacking": "", "again": shows_best, "promoted": promoted, "seeds": seeds}
    return shown | {
        "extended": [Extension(**entry).described() for entry in trials[0]["extended"]],
        "stopped_ahead": stopped.line([stopped.Stopped(**entry) for entry in trials[0]["stopped_ahead"]], of.name),
    }


def _best(of: Snapshot, found: dict[str, Any]) -> dict[str, Any]:
    judged = found["judged"] or {"epoch": None, "metrics": {}}
    return {
        **{key: found[key] for key in ("number", "params", "epoch", "beside", "checkpoint")},
        "values": {metric: finite(value) for metric, value in found["values"].items()},
        "means": found["seeds"] and found["seeds"]["means"],
        "instead": bests.under_other_seeds(found),
        "expected": bests.expectation(found),
        "held_out": {metric: judged["metrics"].get(beside) for metric, beside in of.hold_outs.items()},
        "held_out_as": of.hold_outs,
        "judged_epoch": judged["epoch"],
        "checkpoint_at": of_checkpoint(found["checkpoint_at"], bests.precise) if found["checkpoint"] else "",
        "train": bests.train_command(found),
        "without": bests.preset_left_out(found),
        "imported": bests.imported(found),
    }
