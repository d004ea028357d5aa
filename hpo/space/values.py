"""Handles values of a space: numpy's numbers as Python's, values that are the same option, log-uniform integers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

from trainer.report import Json

LARGEST = 2**53  # the limit below which floats, in which samplers compute, represent every integer
LISTED = 100_000  # the most values of a dimension that are listed


def plain(value: Any) -> Any:
    """Returns `value` with numpy's scalars and arrays in it, however deep, as Python's numbers and lists."""
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
    """Returns a text that two JSON values share if they are one option: 0 and 0.0, but not 1 and true, nor 1 and "1".

    Raises TypeError or ValueError for values that JSON cannot hold.
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
    """Returns True if two JSON values are one option, and False for a value that JSON does not hold."""
    try:
        return identity(a) == identity(b)
    except (TypeError, ValueError):
        return False


def among(value: Any, options: Iterable[Any]) -> bool:
    """Returns True if `value` is one of the options."""
    return any(same(value, option) for option in options)


def is_number(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Returns True if `value` is a finite number of the kind; a boolean is not."""
    if isinstance(value, bool) or not isinstance(value, kind):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return kind is int


def cell(u: float, count: int) -> int:
    """Returns the index of the one of `count` equal cells of [0, 1] that holds `u`."""
    return min(int(u * count), count - 1)


def log_integer(u: float, low: int, high: int) -> int:
    """Returns the integer at `u`, log-uniform over low .. high, where each integer k has [k - 1/2, k + 1/2)."""
    lower, upper = math.log(low - 0.5), math.log(high + 0.5)
    return min(max(round(math.exp(lower + u * (upper - lower))), low), high)


def log_place(value: int, low: int, high: int) -> float:
    """Returns the point of [0, 1] that `log_integer` maps to `value`."""
    lower, upper = math.log(low - 0.5), math.log(high + 0.5)
    return (math.log(value) - lower) / (upper - lower)
