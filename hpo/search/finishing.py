"""Chooses the stopped trials that a study trains to their end after its search: the end phase.

A stopped trial is ahead if the values that it had when it stopped are better than those of the best complete trial. The
first of these trials is trained to its end; then the next one is chosen likewise, within the budget of the phase.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from hpo.search.ranking import best_of, rank

Finish = Literal["auto", "none"]
FINISHES: tuple[Finish, ...] = get_args(Finish)
SHARE = 0.1  # of the epochs that the search has trained
HALF = 0.5  # of a study's time: the most that it reserves for a single trial
FEWEST = 5  # trials of one phase, whatever they cost: after these, almost always none is ahead (docs/performance.md)

Values = Mapping[int, Sequence[float]]
Parts = Mapping[int, Mapping[int, Sequence[float]]]  # number -> epoch -> values


def ahead(objectives: Sequence[Mapping[str, Any]], complete: Values, stopped: Values) -> list[int]:
    """Returns the `stopped` trials that are ahead of the `complete` ones by these values, best first.

    With several objectives these are the stopped trials that no other trial, complete or stopped, dominates.
    """
    finite = {number: values for number, values in stopped.items() if all(map(math.isfinite, values))}
    if len(objectives) > 1:
        return [number for number in best_of(objectives, {**complete, **finite}) if number in finite]
    best = min((rank(objectives[0], 0, values[0]) for values in complete.values()), default=(True, math.inf, 0))
    ranks = {number: rank(objectives[0], 0, values[0]) for number, values in finite.items()}
    return sorted((number for number in ranks if ranks[number] < best), key=lambda number: (ranks[number], number))


def ahead_in_part(
    objectives: Sequence[Mapping[str, object]], complete: Values, stopped: Values, at: Mapping[int, int], parts: Parts
) -> list[int]:
    """Returns the same as `ahead` for trials that train folds or seeds: each is compared over those that it has
    trained.

    at     the number of folds or seeds that a stopped trial has trained
    parts  the values of each complete trial by that number; where one is missing, its final values count
    """
    leading = {number: complete[number] for number in best_of(objectives, complete)}
    numbers: list[int] = []
    for count in sorted(set(at.values()), reverse=True):
        values_at = {number: parts.get(number, {}).get(count, values) for number, values in leading.items()}
        numbers += ahead(objectives, values_at, {number: stopped[number] for number in stopped if at[number] == count})
    return numbers


def is_within(rest: float, trials: int, spent: float, searched: float) -> bool:
    """Returns whether a phase may train one more trial for its `rest` epochs, after `trials` trials.

    It may for the first FEWEST trials, and then while `spent` and `rest` are at most SHARE of the `searched` epochs.
    """
    return trials < FEWEST or spent + rest <= SHARE * searched


def reserved(costs: Iterable[float], seconds: float) -> float:
    """Returns how many of a study's `seconds` belong to trials that would take `costs` to their end, in this order.

    They are those of the first trial, unless it takes over HALF, and of the next ones while all take at most SHARE.
    """
    total = 0.0
    for cost in costs:
        if total + cost > (SHARE if total else HALF) * seconds:
            break
        total += cost
    return total


def trained(objectives: Sequence[Mapping[str, Any]], before: Sequence[float], after: Sequence[float]) -> bool:
    """Returns whether a trial's values `after` it was stopped replace those from `before`.

    They do, unless its best epoch judges it and came before.
    """
    if objectives[0].get("select") != "best":
        return True
    return rank(objectives[0], 0, after[0]) <= rank(objectives[0], 0, before[0])
