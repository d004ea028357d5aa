"""Prints facts as JSON, the same way for every command; docs/guide/json.md lists the keys of each."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import fields, is_dataclass
from os import PathLike, fspath
from typing import Any

from hpo.space.values import plain
from hpo.terminal import print


def print_json(facts: Any) -> None:
    """Prints `facts` on one line of strict JSON: ASCII only, with null for NaN and infinities."""
    print(json.dumps(_strict(plain(facts)), allow_nan=False), file=getattr(sys.stdout, "results", None))


def notes(as_json: bool) -> AbstractContextManager[object]:
    """Returns a context that sends printed text to standard error if JSON is requested."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        return {field.name: _strict(plain(getattr(value, field.name))) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner) for inner in value]
    return fspath(value) if isinstance(value, PathLike) else value
