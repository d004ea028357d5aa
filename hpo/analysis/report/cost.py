"""What a study has cost, what stopping trials early has saved, and what was lost.

{
    "epochs": int                 trained, as `hpo status` counts them
    "attempts": int               goes at a trial
    "driven": float               seconds for which the study was driven, over all resumptions
    "busy": float                 seconds for which workers trained, each worker's own time once
    "idle": float                 seconds between a worker's first begin and last end in which it trained nothing
    "energy": float or null       kWh of the GPUs, mean power times time, of the trials that have measured it
    "measured": int               how many trials have
    "by_state": {state: {"trials": int, "epochs": int, "seconds": float}}
    "saved": {"trials": int, "epochs": int, "share": float or null, "unknown": int}
    "lost": {"attempts": int, "steps": int, "seconds": float}
    "failed": {"trials": int, "epochs": int, "seconds": float}
}
`saved`: epochs that stopped trials were configured to train and have not; `share` is of what would have been trained
without stopping; `unknown` counts stopped trials whose configuration has no number of epochs. `lost`: attempts that
infrastructure took away, the steps that the next one trained again, and the seconds of those attempts. `failed`: what
was spent on trials that failed or are infeasible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hpo.analysis.report.snapshot import Snapshot

if TYPE_CHECKING:
    from hpo.ledger.rows import RowMapping

SPENT_IN_VAIN = ("failed", "infeasible")


def cost(of: Snapshot) -> dict[str, Any]:
    """Of all trials, over all resumptions."""
    seconds = {trial["number"]: _seconds(of, trial) for trial in of.trials}
    by_state: dict[str, dict[str, Any]] = {}
    for trial in of.trials:
        sums = by_state.setdefault(trial["state"], {"trials": 0, "epochs": 0, "seconds": 0.0})
        sums["trials"] += 1
        sums["epochs"] += trial["epoch"] - trial["from_epoch"]
        sums["seconds"] += seconds[trial["number"]]
    busy, idle = _worked(of)
    energy = [watts * seconds[number] / 3.6e6 for number, watts in of.power.items() if number in seconds]
    vain = [by_state[state] for state in SPENT_IN_VAIN if state in by_state]
    return {
        "epochs": of.status.epochs_trained,
        "attempts": of.status.attempts,
        "driven": of.status.seconds_used,
        "busy": busy,
        "idle": idle,
        "energy": sum(energy) if energy else None,
        "measured": len(energy),
        "by_state": by_state,
        "saved": saved(of),
        "lost": _lost(of),
        "failed": {key: sum(one[key] for one in vain) for key in ("trials", "epochs", "seconds")},
    }


def saved(of: Snapshot) -> dict[str, Any]:
    """The epochs that stopped trials have not trained."""
    stopped = [trial for trial in of.trials if trial["state"] == "pruned"]
    planned = {trial["number"]: of.planned(trial) for trial in stopped}
    epochs = sum(max(last - t["epoch"], 0) for t in stopped if (last := planned[t["number"]]) is not None)
    unknown = sum(last is None for last in planned.values())
    whole = of.status.epochs_trained + epochs
    share = epochs / whole if whole and unknown < len(stopped) else None
    return {"trials": len(stopped), "epochs": epochs, "share": share, "unknown": unknown}


def _seconds(of: Snapshot, trial: Mapping[str, Any]) -> float:
    """In attempts that have ended."""
    tries = of.attempts.get(trial["id"], ())
    return sum(one["ended_at"] - one["started_at"] for one in tries if one["ended_at"] is not None)


def _worked(of: Snapshot) -> tuple[float, float]:
    """Seconds in which workers trained, trials of a group at once counting once, and in between trained nothing."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for tries in of.attempts.values():
        for one in tries:
            if one["ended_at"] is not None:
                spans.setdefault(one["worker_id"], []).append((one["started_at"], one["ended_at"]))
    busy = {worker: covered(own) for worker, own in spans.items()}
    whole = {worker: max(end for _, end in own) - min(begin for begin, _ in own) for worker, own in spans.items()}
    return sum(busy.values()), sum(whole[worker] - busy[worker] for worker in spans)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def _lost(of: Snapshot) -> dict[str, Any]:
    found = {"attempts": 0, "steps": 0, "seconds": 0.0}
    for tries in of.attempts.values():
        for one in (one for one in tries if one["outcome"] == "lost"):
            found["attempts"] += 1
            found["seconds"] += (one["ended_at"] or one["started_at"]) - one["started_at"]
        found["steps"] += _again(tries)
    return found


def _again(tries: Sequence[RowMapping]) -> int:
    """The steps that an attempt has trained and the next one again."""
    return sum(max(before["step"] - after["from_step"], 0) for before, after in pairwise(tries))
