"""Ranks trials by their objectives and constraints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.search.pareto import Losses, front, fronts


def rank(objective: Mapping[str, Any], number: int, value: float | None) -> tuple[bool, float, int]:
    """By this a trial's value is placed among others, best first: the lowest number among equals, what has none last.

    `objective` is one as `to_json` gives it.
    """
    if value is None or math.isnan(value):
        return True, 0.0, number
    return False, -value if objective["direction"] == "maximize" else value, number


def best_of(objectives: Sequence[Mapping[str, Any]], values: Mapping[int, Sequence[float]]) -> list[int]:
    """The trials that none is better than, of those with these values: one, or with several objectives the Pareto
    front, best first by the first objective."""
    order = sorted(values, key=lambda number: rank(objectives[0], number, values[number][0]))
    if len(objectives) == 1:
        return order[:1]
    among = set(front(losses(objectives, values)))
    return [number for number in order if number in among]


def placed(
    objectives: Sequence[Mapping[str, Any]], values: Mapping[int, Sequence[float]]
) -> dict[int, tuple[int, int]]:
    """Number -> its place, from 0: the front it is in (with one objective, 0) and where it is in all, best first."""
    order = sorted(values, key=lambda number: rank(objectives[0], number, values[number][0]))
    of = {n: i for i, one in enumerate(fronts(losses(objectives, values))) for n in one} if len(objectives) > 1 else {}
    order.sort(key=lambda number: of.get(number, 0))
    return {number: (of.get(number, 0), place) for place, number in enumerate(order)}


def losses(objectives: Sequence[Mapping[str, Any]], values: Mapping[int, Sequence[float]]) -> dict[int, Losses]:
    """Number -> what its values are as losses, lower is better."""
    signs = [-1.0 if one["direction"] == "maximize" else 1.0 for one in objectives]
    return {n: tuple(sign * value for sign, value in zip(signs, own, strict=True)) for n, own in values.items()}
