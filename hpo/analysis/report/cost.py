"""Computes the cost of a study, the savings of stopping trials early, and the losses.

{
    "epochs": int                 trained, as `hpo status` counts them
    "attempts": int               tries to train a trial
    "began": float                when the study was created
    "ended": float or null        when its last attempt ended; null before the first end and while it runs
    "driven": float               seconds for which the study was driven, over all resumptions
    "busy": float                 seconds for which workers trained, each worker's own time once
    "idle": float                 seconds between a worker's first begin and last end in which it trained nothing
    "energy": float or null       kWh of the GPUs, mean power times time, of the trials that have measured it
    "measured": int               how many trials have
    "by_state": {state: {"trials": int, "epochs": int, "seconds": float}}   `removed` stands for a state
    "saved": {"trials": int, "epochs": int, "share": float or null, "unknown": int}
    "lost": {"attempts": int, "steps": int, "seconds": float, "why": [such as "trial 3: pid 14 on box is gone"]}
    "failed": {"trials": int, "epochs": int, "seconds": float}
    "more": str                   what more trials are expected to bring; empty if that is unknown
}
`saved`: epochs that stopped trials were configured to train and have not; `share` is relative to the epochs without
stopping; `unknown` counts stopped trials whose configuration has no number of epochs. `lost`: attempts that
infrastructure ended, the steps that the next attempt trained again, and the seconds of those attempts. `failed`: the
cost of trials that failed or are infeasible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hpo.analysis.report.snapshot import LOST, Snapshot
from hpo.analysis.results.forecast import expected
from hpo.ledger.rows import AskedTrial

if TYPE_CHECKING:
    from hpo.ledger.rows import AttemptRow

SPENT_IN_VAIN = ("failed", "infeasible")


def cost(of: Snapshot) -> dict[str, Any]:
    """Returns what all trials have cost, over all resumptions; removed trials count as a state of their own."""
    seconds = {trial.number: _seconds(of, trial) for trial in of.trials}
    by_state: dict[str, dict[str, Any]] = {}
    for trial in of.trials:
        sums = by_state.setdefault(trial.state, {"trials": 0, "epochs": 0, "seconds": 0.0})
        sums["trials"] += 1
        sums["epochs"] += trial.epoch - trial.from_epoch
        sums["seconds"] += seconds[trial.number]
    if (removed := of.status.removed_cost).count:
        by_state["removed"] = {"trials": removed.count, "epochs": removed.epochs, "seconds": removed.seconds}
    busy, idle = _worked(of)
    energy = [watts * seconds[number] / 3.6e6 for number, watts in of.power.items() if number in seconds]
    in_vain = [by_state[state] for state in SPENT_IN_VAIN if state in by_state]
    return {
        "epochs": of.status.epochs_trained,
        "attempts": of.status.attempts,
        "began": of.study.created_at,
        "ended": _ended(of),
        "driven": of.status.seconds_used,
        "busy": busy,
        "idle": idle,
        "energy": sum(energy) if energy else None,
        "measured": len(energy),
        "by_state": by_state,
        "saved": saved(of),
        "lost": _lost(of),
        "failed": {key: sum(sums[key] for sums in in_vain) for key in ("trials", "epochs", "seconds")},
        "more": _more(of),
    }


def _ended(of: Snapshot) -> float | None:
    """Returns the end of the last attempt; None if there is none or one is under way."""
    ends = [attempt.ended_at for tries in _every(of) for attempt in tries]
    last = max((end for end in ends if end is not None), default=None)
    return None if None in ends or of.status.state == "running" else last


def _more(of: Snapshot) -> str:
    more = expected(of.study, of.status.best, of.trials) if of.status.best else None
    return more.described() if more else ""


def saved(of: Snapshot) -> dict[str, Any]:
    """Returns the epochs that stopped trials have not trained."""
    stopped = [trial for trial in of.trials if trial.state == "pruned"]
    planned = {trial.number: of.planned(trial) for trial in stopped}
    epochs = sum(max(last - t.epoch, 0) for t in stopped if (last := planned[t.number]) is not None)
    unknown = sum(last is None for last in planned.values())
    whole = of.status.epochs_trained - of.status.removed_cost.epochs + epochs
    share = epochs / whole if whole and unknown < len(stopped) else None
    return {"trials": len(stopped), "epochs": epochs, "share": share, "unknown": unknown}


def _every(of: Snapshot) -> Iterable[Sequence[AttemptRow]]:
    """Returns the attempts of each trial, removed ones included, during which workers were not idle."""
    return [*of.attempts.values(), *of.removed_attempts]


def _seconds(of: Snapshot, trial: AskedTrial) -> float:
    """Returns the seconds of a trial in attempts that have ended."""
    tries = of.attempts.get(trial.id, ())
    return sum(attempt.ended_at - attempt.started_at for attempt in tries if attempt.ended_at is not None)


def _worked(of: Snapshot) -> tuple[float, float]:
    """Returns the seconds in which workers trained, and the seconds in between; trials of a group count once."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for tries in _every(of):
        for attempt in tries:
            if attempt.ended_at is not None:
                spans.setdefault(attempt.worker_id, []).append((attempt.started_at, attempt.ended_at))
    busy = {worker: covered(times) for worker, times in spans.items()}
    whole = {worker: max(end for _, end in times) - min(begin for begin, _ in times) for worker, times in spans.items()}
    return sum(busy.values()), sum(whole[worker] - busy[worker] for worker in spans)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def _lost(of: Snapshot) -> dict[str, Any]:
    why = [f"trial {number}: {event.fields['why']}" for number, event in of.befell_trials(LOST) if number is not None]
    sums = {"attempts": 0, "steps": 0, "seconds": 0.0}
    for tries in _every(of):
        for attempt in (attempt for attempt in tries if attempt.outcome == "lost"):
            sums["attempts"] += 1
            sums["seconds"] += (attempt.ended_at or attempt.started_at) - attempt.started_at
        sums["steps"] += _again(tries)
    return {**sums, "why": why}


def _again(tries: Sequence[AttemptRow]) -> int:
    """Returns the steps that an attempt has trained and the next one trained again."""
    return sum(max(before.step - after.from_step, 0) for before, after in pairwise(tries))
