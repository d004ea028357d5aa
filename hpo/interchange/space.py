"""Builds the space of an imported study from the tool's own dimensions, or from the values of its trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpo.space.dimension import Dimension
from hpo.space.dimensions import Choice, Float, Int
from hpo.space.values import LARGEST, identity, is_number

_WIDE = 1000  # positive numbers of at least this ratio are taken as searched on a logarithmic scale


def merged(dimensions: Iterable[Dimension]) -> Dimension:
    """Returns a dimension that contains every value of the others.

    It spans all numbers, or has all options of choices; a mixture keeps the named values.
    """
    every = list(dimensions)
    if len({identity(dimension.describe()) for dimension in every}) == 1:
        return every[0]
    numbers = [dimension for dimension in every if isinstance(dimension, Float | Int)]
    if len(numbers) < len(every):
        return _choice([value for dimension in every for value in _ends(dimension)])
    low, high = min(dimension.low for dimension in numbers), max(dimension.high for dimension in numbers)
    log = all(dimension.log for dimension in numbers)
    if all(isinstance(dimension, Int) for dimension in numbers):
        return Int(int(low), int(high), log=log)
    return Float(float(low), float(high), log=log)


def _ends(dimension: Dimension) -> Sequence[Any]:
    return dimension.options if isinstance(dimension, Choice) else dimension.extremes()


def observed(values: Sequence[Any]) -> Dimension:
    """Returns the narrowest dimension that contains the values."""
    if all(is_number(value, int) and abs(value) <= LARGEST for value in values):
        return Int(min(values), max(values))
    if all(is_number(value, (int, float)) for value in values):
        low, high = float(min(values)), float(max(values))
        return Float(low, high, log=low > 0 and high / low >= _WIDE)
    return _choice(values)


def _choice(values: Sequence[object]) -> Choice:
    """Returns a choice of the values, each once, in the order of their first appearance."""
    return Choice(list({identity(value): value for value in values}.values()))


def usable(one: Dimension) -> bool:
    """Returns whether a space here can have the dimension: whole numbers end at 2**53 and options are finite."""
    return not any(one.faults())


def space_of(
    params: Sequence[Mapping[str, object]], told: Sequence[Mapping[str, Dimension]]
) -> tuple[dict[str, Dimension], list[str]]:
    """Returns (name -> dimension of every parameter of the trials, names of those derived from values alone).

    `params` and `told` have one entry for each trial, in the same order. A dimension is widened to contain all values
    tried.
    """
    names = dict.fromkeys(name for tried in params for name in tried)
    space: dict[str, Dimension] = {}
    guessed: list[str] = []
    for name in names:
        values = [tried[name] for tried in params if name in tried]
        known = [searched[name] for searched in told if name in searched and usable(searched[name])]
        if len(known) < len(values):
            guessed.append(name)
            known.append(observed(values))
        dimension = merged(known)
        space[name] = dimension if all(map(dimension.may_be, values)) else merged([dimension, observed(values)])
    return space, guessed
