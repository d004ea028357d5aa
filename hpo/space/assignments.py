"""Reads the settings of a configuration: `path=value` as typed, or a mapping from Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.door import option
from hpo.errors import UserError
from hpo.space.config import Raw, flatten, load_yaml, parse_override
from hpo.space.values import is_number, plain

NO_PRESET = "none"  # in place of a preset's name


def assignments(typed: Sequence[str] | None) -> dict[str, Any]:
    """Returns the values of `path=value` texts, by path; the last value of a path counts.

    Raises UserError for any other text.
    """
    values: dict[str, Any] = {}
    for path, value in map(parse_override, typed or ()):
        if value == "":
            raise UserError(
                f"{option('overrides')} {path}= gives no value: write {path}=null for none, or {path}='\"\"' for empty "
                "text."
            )
        values |= flatten({path: value})
    return values


def as_typed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings from Python, by path, as the command line has them: a text field takes 8 as well as '8'."""
    flat = flatten(plain(dict(values)))
    return {path: Raw(value) if is_number(value, (int, float)) else value for path, value in flat.items()}


def overrides(config: str | os.PathLike[str] | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a file's settings and those given beside it; the latter win."""
    return {**(flatten(load_yaml(os.fspath(config))) if config else {}), **values}
