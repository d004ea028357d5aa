"""Ranks trials by their objectives and constraints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.search.pareto import Losses, front, fronts


def rank(objective: Mapping[str, Any], number: int, value: float | None) -> tuple[bool, float, int]:
    """Returns the sort key of a trial's value: best first, ties by number, trials without a value last.

    `objective` is an objective as `to_json` returns it.
    """
    if value is None or math.isnan(value):
        return True, 0.0, number
    return False, -value if objective["direction"] == "maximize" else value, number


def best_of(objectives: Sequence[Mapping[str, Any]], values: Mapping[int, Sequence[float]]) -> list[int]:
    """Returns the best of the trials with these values; with several objectives the Pareto front, best first by the
    first objective."""
    order = sorted(values, key=lambda number: rank(objectives[0], number, values[number][0]))
    if len(objectives) == 1:
        return order[:1]
    among = set(front(losses(objectives, values)))
    return [number for number in order if number in among]


def placed(
    objectives: Sequence[Mapping[str, Any]], values: Mapping[int, Sequence[float]]
) -> dict[int, tuple[int, int]]:
    """Returns number -> (front, rank), both from 0, best first; with one objective the front is always 0."""
    order = sorted(values, key=lambda number: rank(objectives[0], number, values[number][0]))
    front_of: dict[int, int] = {}
    if len(objectives) > 1:
        front_of = {number: i for i, members in enumerate(fronts(losses(objectives, values))) for number in members}
    order.sort(key=lambda number: front_of.get(number, 0))
    return {number: (front_of.get(number, 0), position) for position, number in enumerate(order)}


def losses(objectives: Sequence[Mapping[str, Any]], values: Mapping[int, Sequence[float]]) -> dict[int, Losses]:
    """Returns number -> values as losses, of which lower are better."""
    signs = [-1.0 if objective["direction"] == "maximize" else 1.0 for objective in objectives]
    return {n: tuple(sign * value for sign, value in zip(signs, row, strict=True)) for n, row in values.items()}
