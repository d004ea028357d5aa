"""Encodes values so that a checkpoint, whose manifest is JSON, returns them unchanged.

JSON has neither tuples nor keys other than text. `encoded` replaces them by {"$tuple": [...]} and
{"$items": [[key, value], ...]}, and `decoded` turns these back. Tensors stay as they are.
"""

from __future__ import annotations

from typing import Any

_TUPLE, _ITEMS = "$tuple", "$items"


def encoded(value: Any) -> Any:
    """Returns `value` with only lists and dicts of text keys around its tensors, numbers and texts."""
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encoded(entry) for key, entry in value.items()}
        return {_ITEMS: [[encoded(key), encoded(entry)] for key, entry in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [encoded(entry) for entry in value]}
    return [encoded(entry) for entry in value] if isinstance(value, list) else value


def decoded(value: Any) -> Any:
    """Returns the argument of `encoded`. Values of earlier releases, without marks, stay as they are."""
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(decoded(entry) for entry in value[_TUPLE])
        if value.keys() == {_ITEMS}:
            return {decoded(key): decoded(entry) for key, entry in value[_ITEMS]}
        return {key: decoded(entry) for key, entry in value.items()}
    return [decoded(entry) for entry in value] if isinstance(value, list) else value
