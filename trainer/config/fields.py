"""Holds field types that configurations share."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

T = TypeVar("T")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def size(value: Any) -> Any:
    """Returns the bytes of `10GB` (10^10), `512 MiB` (512 * 2^20) or `4096`; values other than text as they are.

    Raises ValueError for text that is not a size.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError("give a number of bytes, or such as 500MB, 10GB or 16GiB")
    number, prefix, binary = match.groups()
    return round(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))


Mode = Literal["min", "max"]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, BeforeValidator(size), Field(ge=1)]  # 4096, or text such as 10GB
Beta = Annotated[float, Field(ge=0, lt=1)]


def added(default: T) -> T:
    """Returns a field that was added after studies had begun: a configuration's JSON leaves it out at its default.

    So the configuration of a begun study keeps its JSON and its hash, in this release and in the one before it.
    """
    return Field(default, exclude_if=lambda value: value == default)


class Frozen(BaseModel):
    """A part of the configuration: immutable, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


PATTERN = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
