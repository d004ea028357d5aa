"""The space of an imported study: the tool's own dimensions where it tells them, else what its trials have tried."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpo.space.dimension import Dimension
from hpo.space.dimensions import Choice, Float, Int
from hpo.space.values import LARGEST, identity, is_number

_WIDE = 1000  # of positive numbers that span so much, the logarithm is what was searched


def merged(dimensions: Iterable[Dimension]) -> Dimension:
    """What holds every value of each: the hull of numbers, all options of choices; of a mixture the options named."""
    every = list(dimensions)
    if len({identity(one.describe()) for one in every}) == 1:
        return every[0]
    numbers = [one for one in every if isinstance(one, Float | Int)]
    if len(numbers) < len(every):
        return _choice([value for one in every for value in _ends(one)])
    low, high = min(one.low for one in numbers), max(one.high for one in numbers)
    log = all(one.log for one in numbers)
    if all(isinstance(one, Int) for one in numbers):
        return Int(int(low), int(high), log=log)
    return Float(float(low), float(high), log=log)


def _ends(one: Dimension) -> Sequence[Any]:
    return one.options if isinstance(one, Choice) else one.extremes()


def observed(values: Sequence[Any]) -> Dimension:
    """A dimension that holds the values and no more than their range."""
    if all(is_number(value, int) and abs(value) <= LARGEST for value in values):
        return Int(min(values), max(values))
    if all(is_number(value, (int, float)) for value in values):
        low, high = float(min(values)), float(max(values))
        return Float(low, high, log=low > 0 and high / low >= _WIDE)
    return _choice(values)


def _choice(values: Sequence[Any]) -> Choice:
    """The values as options, each once, in the order of their first appearance."""
    return Choice(list({identity(value): value for value in values}.values()))


def usable(one: Dimension) -> bool:
    """Whether the dimension can be one of a space here, where whole numbers end at 2**53 and options are finite."""
    return not any(one.faults())


def space_of(
    params: Sequence[Mapping[str, Any]], told: Sequence[Mapping[str, Dimension]]
) -> tuple[dict[str, Dimension], list[str]]:
    """Name -> dimension of every parameter of the trials, and those that had to be taken from the values alone.

    `params` and `told` are of one trial at each place. A dimension that does not hold what was tried is widened to it.
    """
    names = dict.fromkeys(name for one in params for name in one)
    space: dict[str, Dimension] = {}
    guessed: list[str] = []
    for name in names:
        values = [one[name] for one in params if name in one]
        known = [one[name] for one in told if name in one and usable(one[name])]
        if len(known) < sum(name in one for one in params):
            guessed.append(name)
            known.append(observed(values))
        dimension = merged(known)
        space[name] = dimension if all(map(dimension.may_be, values)) else merged([dimension, observed(values)])
    return space, guessed
