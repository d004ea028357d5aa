"""Reads values that a tool keeps as text, as MLflow keeps parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


def read_columns(rows: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """The rows with numbers, truths and nothing in the place of their texts, wherever a name has no other text."""
    names = {name for row in rows for name in row}
    plain = {name: all(is_plain(row[name]) for row in rows if name in row) for name in names}
    return [{name: value_of(text) if plain[name] else text for name, text in row.items()} for row in rows]


def is_plain(text: str) -> bool:
    """Whether a text stands for a number, a truth or nothing."""
    return text in _WORDS or _number(text) is not None


def value_of(text: str) -> Any:
    """What the text stands for; itself where that is nothing but a text."""
    if text in _WORDS:
        return _WORDS[text]
    number = _number(text)
    return text if number is None else number


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if math.isfinite(value) and "_" not in text else None
    return None


def flat(values: Mapping[str, Any], separator: str) -> dict[str, Any]:
    """Nested mappings as one, the names joined by `separator`; lists and empty mappings are values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= {f"{name}{separator}{inner}": one for inner, one in flat(value, separator).items()}
        else:
            found[str(name)] = value
    return found


def json_object(text: str, place: str, problem: type[Exception]) -> dict[str, Any]:
    """The object that a text holds. Raises `problem`, which names the place."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise problem(f"{place} is damaged ({error}): restore it from a backup.") from error
    if not isinstance(found, dict):
        raise problem(f"{place} holds no JSON object: restore it from a backup.")
    return found
