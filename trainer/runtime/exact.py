"""Writes values so that a checkpoint, whose manifest is JSON, gives them back as they were.

JSON has neither tuples nor keys that are no text. `encoded` puts {"$tuple": [...]} and {"$items": [[key, value], ...]}
in their place, and `decoded` takes these for what they stand for. Tensors stay as they are.
"""

from __future__ import annotations

from typing import Any

_TUPLE, _ITEMS = "$tuple", "$items"


def encoded(value: Any) -> Any:
    """Returns `value` with nothing but lists and dicts of text keys around its tensors, numbers and texts."""
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encoded(entry) for key, entry in value.items()}
        return {_ITEMS: [[encoded(key), encoded(entry)] for key, entry in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [encoded(entry) for entry in value]}
    return [encoded(entry) for entry in value] if isinstance(value, list) else value


def decoded(value: Any) -> Any:
    """Returns what `encoded` was given. What earlier releases wrote, without marks, stays as it is."""
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(decoded(entry) for entry in value[_TUPLE])
        if value.keys() == {_ITEMS}:
            return {decoded(key): decoded(entry) for key, entry in value[_ITEMS]}
        return {key: decoded(entry) for key, entry in value.items()}
    return [decoded(entry) for entry in value] if isinstance(value, list) else value
