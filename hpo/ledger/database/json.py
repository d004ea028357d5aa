"""Converts values to a form that every database accepts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer.report import Json


def text(value: str) -> str:
    """Returns `value` in a form that every database accepts: NUL as its picture, half a surrogate pair as its
    escape."""
    return value.replace("\0", "\N{SYMBOL FOR NULL}").encode("utf-8", "backslashreplace").decode()


def plain(value: Json) -> Any:
    """Returns `value` as JSON that every database accepts: non-finite floats become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {text(str(key)): plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [plain(member) for member in value]
    return value
