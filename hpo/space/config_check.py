"""Checks a space against the configuration that it will change: paths, references, rules and reachable values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from random import Random
from typing import Any

from pydantic import BaseModel

from hpo.errors import SpaceError
from hpo.space.config import as_json, flatten, misfit
from hpo.space.dimensions import Choice, Int
from hpo.space.error_list import raise_all
from hpo.space.paths import check_path
from hpo.space.space import Space
from hpo.space.values import LISTED
from hpo.text import near

DRAWS = 256  # random points of which at least one must keep all rules


def check(space: Space, config: BaseModel) -> None:
    """Raises SpaceError, which names every mistake, unless the space fits the configuration's type.

    Checks every path, reference, rule and reachable value.
    """
    config_type, fixed = type(config), flatten(as_json(config))
    raise_all(mistake for path in space.paths for mistake in _of_dimension(space, config_type, path, fixed))
    raise_all(_of_rules(space, config_type))
    if not space.rules:
        return
    draw = Random(0)
    points = ([draw.random() for _ in space.paths] for _ in range(DRAWS))
    faults = [space.fault(space.decode(space.from_unit(point), fixed), fixed) for point in points]
    if all(faults):
        raise SpaceError(f"{faults[0]}, and at none of {DRAWS} points drawn at random do all rules hold: loosen it.")


def _of_dimension(space: Space, config_type: type[BaseModel], path: str, fixed: Mapping[str, Any]) -> Iterator[str]:
    """Yields the first mistake of a dimension, if it has any."""
    try:
        check_path(config_type, path)
        for reference in sorted(space.dimensions[path].named):
            _check_reference(space, config_type, path, reference)
        for divisor in _divisors(space, path, fixed):
            _check_values(space, config_type, path, divisor)
    except SpaceError as error:
        yield str(error)


def _of_rules(space: Space, config_type: type[BaseModel]) -> Iterator[str]:
    for rule in space.rules_read:
        for path in rule.paths:
            if path not in space.dimensions:
                try:
                    check_path(config_type, path)
                except SpaceError as error:
                    yield f"rule {rule.text!r} names an {error}"


def _check_reference(space: Space, config_type: type[BaseModel], path: str, reference: str) -> None:
    if reference not in space.dimensions:
        try:
            check_path(config_type, reference)
        except SpaceError as error:
            raise SpaceError(f"{path} depends on an {error}") from error
    for value in space.dimensions[path].conditions.get(reference, ()):
        if reference in space.dimensions:
            possible = space.dimensions[reference].may_be(value)
        else:
            possible = misfit(config_type, reference, value) is None
        if not possible:
            options = getattr(space.dimensions.get(reference), "options", ())
            hint = near(str(value), map(str, options))
            raise SpaceError(f"{path} asks for {reference}={value!r}, which never holds{hint or '.'}")


def _check_values(space: Space, config_type: type[BaseModel], path: str, divisor: int) -> None:
    dimension = space.dimensions[path]
    if isinstance(dimension, Int) and not len(dimension.allowed(divisor)):
        raise SpaceError(
            f"{path}: no value in [{dimension.low}, {dimension.high}] is a multiple of "
            f"{dimension.multiple_of}={divisor}; widen the range or narrow {dimension.multiple_of}."
        )
    for value in dimension.extremes(divisor):
        if reason := misfit(config_type, path, value):
            raise SpaceError(f"{path}: its value {value!r} does not fit the configuration: {reason}.")


def _divisors(space: Space, path: str, fixed: Mapping[str, Any]) -> Iterator[int]:
    """Yields every divisor that the dimension may meet; 1 without any. Raises SpaceError for one that cannot divide."""
    reference = space.dimensions[path].divisor
    if reference is None:
        yield 1
        return
    source = space.dimensions.get(reference)
    values: list[Iterable[Any]] = []
    if isinstance(source, Int):
        if source.count > LISTED:
            raise SpaceError(
                f"{path}: multiple_of={reference!r} may be any of {source.count} numbers, and each is looked at: "
                f"narrow it to {LISTED}."
            )
        values.extend(source.allowed(divisor) for divisor in _divisors(space, reference, fixed))
    elif isinstance(source, Choice):
        values.append(source.options)
    elif source is not None:
        raise SpaceError(f"{path}: multiple_of={reference!r} must name whole numbers, not a {type(source).__name__}.")
    # The field's own value counts if no dimension sets it, or that dimension is inactive.
    conditions = space.dimensions[path].conditions
    if source is None or any(conditions.get(key) != allowed for key, allowed in source.conditions.items()):
        values.append([fixed.get(reference)])
    for value in (value for group in values for value in group):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SpaceError(f"{path}: multiple_of needs {reference} to be a whole number from 1, not {value!r}.")
        yield value
