"""Reads dimensions of a space from YAML: `lr: {type: float, low: 1e-4, high: 0.1, log: true}`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from hpo.errors import SpaceError
from hpo.space.dimension import Dimension
from hpo.space.dimensions import Bool, Choice, Float, Int
from hpo.text import near
from trainer.quote import quoted

_TYPES: dict[str, type[Dimension]] = {"float": Float, "int": Int, "choice": Choice, "bool": Bool}


def read(where: str, given: Mapping[str, object]) -> dict[str, Dimension]:
    """Returns parameter -> dimension; the Space checks the ranges.

    Raises SpaceError, which begins with `where` and the parameter.
    """
    if not given:
        raise SpaceError(f"{where} is empty: write such as `lr: {{type: float, low: 1e-4, high: 0.1, log: true}}`.")
    return {name: _dimension(f"{where}.{name}", fields) for name, fields in given.items()}


def _dimension(where: str, given: object) -> Dimension:
    if not isinstance(given, Mapping):
        raise SpaceError(f"{where}={quoted(given)} is not a dimension: write {{type: float, low: 0.0, high: 1.0}}.")
    arguments = dict(given)
    kind = arguments.pop("type", None)
    if kind not in _TYPES:
        known = ", ".join(_TYPES)
        raise SpaceError(f"{where}: type={quoted(kind)} is none of {known}{near(str(kind), _TYPES) or '.'}")
    dimension = _TYPES[kind]
    takes = inspect.signature(dimension).parameters
    if unknown := [key for key in arguments if key not in takes]:
        raise SpaceError(f"{where}: type {kind} has no {unknown[0]!r}: it has {', '.join(takes)}.")
    if missing := [
        key for key, argument in takes.items() if argument.default is argument.empty and key not in arguments
    ]:
        raise SpaceError(f"{where}: type {kind} needs {' and '.join(missing)}.")
    return dimension(**arguments)
