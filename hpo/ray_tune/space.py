"""Translates a space into Ray Tune's domains, and Tune's samples back into values of the space."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from ray import tune

from hpo.declaration.study import Study
from hpo.search.samplers.reject import redrawn
from hpo.space.dimension import Dimension
from hpo.space.dimensions import Choice, Float, Int
from hpo.space.hashing import json_sha256
from hpo.space.values import LISTED


def param_space(study: Study) -> dict[str, Any]:
    """Returns the study's space for Tune: path -> a domain to draw from. Conditions are applied when a trial begins."""
    return {path: _domain(dimension) for path, dimension in study.space.dimensions.items()}


def _domain(dimension: Dimension) -> Any:
    if isinstance(dimension, Float):
        if dimension.step is not None:
            return tune.quniform(dimension.low, dimension.high, dimension.step)
        return (tune.loguniform if dimension.log else tune.uniform)(dimension.low, dimension.high)
    if isinstance(dimension, Int):
        return _integers(dimension)
    assert isinstance(dimension, Choice)
    return tune.choice(list(dimension.options))


def _integers(dimension: Int) -> Any:
    irregular = dimension.powers_of_two or dimension.multiple_of is not None
    irregular = irregular or bool(dimension.low % dimension.step)  # Tune rounds to multiples of the step
    if irregular and dimension.count <= LISTED:
        return tune.choice(list(dimension.allowed()))
    if dimension.log:
        return tune.lograndint(dimension.low, dimension.high + 1)
    if dimension.step == 1 or irregular:  # `_nearest` maps an integer to an allowed one
        return tune.randint(dimension.low, dimension.high + 1)
    return tune.qrandint(dimension.low, dimension.high, dimension.step)


def params_of(study: Study, config: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (coordinates, parameters) for Tune's values, each replaced by the nearest that the space allows.

    Draws them again if a rule does not hold.
    """
    space = study.space
    fitted: dict[str, Any] = {}
    for path in space.order:
        if path in config:
            fitted[path] = _nearest(*space.there(path, fitted), config[path])
    coordinates = space.encode(fitted, space.from_unit([0.5] * len(space)), strict=False)
    if space.rejects:
        seed = int(json_sha256(coordinates)[:15], 16)
        _, coordinates = redrawn(space, coordinates, seed, 0)
    return coordinates, space.decode(coordinates)


def _nearest(dimension: Dimension, divisor: int, value: Any) -> Any:
    """Returns the nearest allowed value, since a perturbing scheduler ignores bounds."""
    dimension = dimension.set_relative(False)
    if isinstance(dimension, Float):
        inside = min(max(float(value), dimension.low), dimension.high)
        return inside if dimension.step is None else dimension.from_unit(dimension.to_unit(inside))
    if isinstance(dimension, Int):
        allowed = dimension.allowed(divisor)
        above = bisect_left(allowed, value)
        return min(allowed[max(above - 1, 0) : above + 1], key=lambda one: abs(one - value))
    return value
