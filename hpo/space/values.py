"""Values of a space: numbers of numpy as Python's, which values are the same option, log-uniform whole numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

from trainer.report import Json

LARGEST = 2**53  # up to which every whole number is a float, in which samplers compute
LISTED = 100_000  # values of a dimension, at most, where all are listed


def plain(value: Any) -> Any:
    """`value` with the scalars and arrays of numpy in it, however deep, as Python's numbers and lists."""
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # numpy is not imported for it
        return value.tolist()
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        return {plain(key): plain(inner) for key, inner in items.items()}
    kinds: tuple[type[Any], ...] = (list, tuple, set, frozenset)
    for kind in kinds:
        if type(value) is kind:
            return cast("Any", kind)(map(plain, cast("Iterable[Any]", value)))
    return value


def identity(value: Any) -> str:
    """A text that two JSON values share where they are one option: 0 and 0.0, but neither 1 and true nor 1 and "1".

    Raises TypeError or ValueError for what JSON does not hold.
    """
    return json.dumps(_exact(value), sort_keys=True, allow_nan=False)


def _exact(value: Json) -> Json:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _exact(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(inner) for inner in value]
    return value


def same(a: Any, b: Any) -> bool:
    """Whether two JSON values are one option; what JSON does not hold is none."""
    try:
        return identity(a) == identity(b)
    except (TypeError, ValueError):
        return False


def among(value: Any, options: Iterable[Any]) -> bool:
    """Whether `value` is one of the options."""
    return any(same(value, option) for option in options)


def is_number(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether `value` is a finite number of the kind, a truth being none."""
    if isinstance(value, bool) or not isinstance(value, kind):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond what a float holds
        return kind is int


def cell(u: float, count: int) -> int:
    """The cell of [0, 1] cut into `count` equal ones that holds `u`."""
    return min(int(u * count), count - 1)


def log_integer(u: float, low: int, high: int) -> int:
    """Log-uniform over low .. high, each integer k owning [k - 1/2, k + 1/2)."""
    lower, upper = math.log(low - 0.5), math.log(high + 0.5)
    return min(max(round(math.exp(lower + u * (upper - lower))), low), high)


def log_place(value: int, low: int, high: int) -> float:
    """The point of [0, 1] that `log_integer` takes to `value`."""
    lower, upper = math.log(low - 0.5), math.log(high + 0.5)
    return (math.log(value) - lower) / (upper - lower)
