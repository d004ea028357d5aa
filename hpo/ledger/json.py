"""Values as every database takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer.report import Json


def text(value: str) -> str:
    """`value` as every database takes it: NUL as its picture, half a surrogate pair as its escape."""
    return value.replace("\0", "\N{SYMBOL FOR NULL}").encode("utf-8", "backslashreplace").decode()


def plain(value: Json) -> Any:
    """`value` as JSON that every database accepts: non-finite floats become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {text(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
