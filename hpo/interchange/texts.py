"""Parses values that a tool stores as text, such as MLflow's parameters, and converts a file's values to JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

DEEPEST = 50  # levels of nesting in a value
YEARS = (-62135596800, 253402300800)  # seconds since the epoch, from the year 1 to the year 10000
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


def read_columns(rows: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Returns the rows with texts as numbers, booleans and None, for names whose texts all denote such values."""
    names = {name for row in rows for name in row}
    plain = {name: all(is_plain(row[name]) for row in rows if name in row) for name in names}
    return [{name: value_of(text) if plain[name] else text for name, text in row.items()} for row in rows]


def is_plain(text: str) -> bool:
    """Returns whether a text denotes a number, a boolean or None."""
    return text in _WORDS or _number(text) is not None


def value_of(text: str) -> Any:
    """Returns the value that the text denotes, or the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    number = _number(text)
    return text if number is None else number


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            value = kind(text)
            return value if math.isfinite(value) and "_" not in text else None
        except (ValueError, OverflowError):
            continue
    return None


def flat(values: Mapping[str, object], separator: str) -> dict[str, Any]:
    """Returns nested mappings as one, with names joined by `separator`; lists and empty mappings are values."""
    joined: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            joined |= {f"{name}{separator}{key}": inner for key, inner in flat(value, separator).items()}
        else:
            joined[str(name)] = value
    return joined


def json_object(text: str, where: str, problem: type[Exception]) -> dict[str, Any]:
    """Returns the JSON object in a text. Raises `problem`, whose message begins with `where`."""
    try:
        value = loads(text)
    except ValueError as error:
        raise problem(f"{where} is damaged ({error}): restore it from a backup.") from error
    if not isinstance(value, dict):
        raise problem(f"{where} holds no JSON object: restore it from a backup.")
    return value


def loads(text: str) -> Any:
    """Returns the JSON value in a text. Raises ValueError, also for a value with more than DEEPEST levels."""
    try:
        return as_json(json.loads(text))
    except RecursionError:
        raise ValueError(f"it has more than {DEEPEST} levels") from None


def as_json(value: object, level: int = 0) -> Any:
    """Returns a value as JSON. Raises ValueError for a value with more than DEEPEST levels.

    Times become text in ISO 8601, durations seconds, bytes text or hexadecimal, and decimals numbers.
    """
    if level > DEEPEST:
        raise ValueError(f"it has more than {DEEPEST} levels")
    match value:
        case None | bool() | str() | int() | float():
            return value
        case Mapping():
            return {str(key): as_json(inner, level + 1) for key, inner in value.items()}
        case list() | tuple() | set():
            return [as_json(inner, level + 1) for inner in value]
        case Decimal():
            return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
        case date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return value.hex()
    return str(value)


def as_number(value: object) -> float | None:
    """Returns a number as a float; None for anything else, and for a number that no float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def as_time(value: object) -> float | None:
    """Returns seconds since the epoch; None for a value outside the years 1 to 9999."""
    seconds = as_number(value)
    return seconds if seconds is not None and YEARS[0] < seconds < YEARS[1] else None
