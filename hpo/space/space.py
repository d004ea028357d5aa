"""Search spaces: dimensions of a typed configuration, conditional and dependent ones, valid by construction.

A sampler sees one fixed coordinate per dimension, whether or not the dimension is active, so its space never
changes from trial to trial. `decode` turns coordinates into parameters: it drops inactive dimensions and reads a
dependent one (`multiple_of`) from the unit interval among the values its divisor allows. Nothing is ever redrawn.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as _field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from typing import Any

from pydantic import BaseModel

from hpo.errors import SpaceError
from hpo.space.config import as_json, check_path, flatten, misfit
from hpo.space.dimensions import Bool, Choice, Coordinate, Dimension, Float, Int
from hpo.space.values import LISTED, among
from hpo.text import near

__all__ = ["Bool", "Choice", "Coordinate", "Dimension", "Float", "Int", "Space"]


@dataclass(frozen=True)
class Space:
    """Dimensions by dotted path, in any order, and the values of the fields their conditions and divisors name.

    Raises SpaceError where a dimension is declared wrongly or references form a cycle. Whether the dimensions fit
    a configuration is asked with `check`; `bound` then fixes the fields that are no dimensions.
    """

    dimensions: Mapping[str, Dimension]
    fixed: Mapping[str, Any] = _field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for path, dimension in dict[str, object](self.dimensions).items():
            if not isinstance(dimension, Dimension):
                raise SpaceError(f"{path}: {dimension!r} is not a dimension; use Float, Int, Choice or Bool.")
            for fault in dimension.faults():
                raise SpaceError(f"{path}: {fault}.")
            if dimension.prior is not None and dimension.at(dimension.prior) is None:
                raise SpaceError(f"{path}: prior={dimension.prior!r} is not among its values.")
        for path in self.dimensions:
            parts = path.split(".")
            for end in range(1, len(parts)):
                if (parent := ".".join(parts[:end])) in self.dimensions:
                    raise SpaceError(f"{path} is a part of {parent}, which is a dimension too; keep one of them.")
        _ = self._order

    def __len__(self) -> int:
        return len(self.dimensions)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """All paths, sorted: the order of the unit cube's axes."""
        return tuple(sorted(self.dimensions))

    @cached_property
    def _references(self) -> dict[str, set[str]]:
        """Path -> the paths of dimensions and fields it depends on."""
        return {
            path: {*dimension.conditions, *([dimension.divisor] if dimension.divisor else [])}
            for path, dimension in self.dimensions.items()
        }

    def references(self, path: str) -> set[str]:
        """The dimensions and fields that the dimension at `path` depends on."""
        return self._references[path]

    @cached_property
    def has_priors(self) -> bool:
        return any(dimension.prior is not None for dimension in self.dimensions.values())

    @cached_property
    def _order(self) -> tuple[str, ...]:
        """Paths, what is referred to before what refers to it."""
        graph = {path: sorted(self._references[path]) for path in self.paths}
        try:
            order = tuple(TopologicalSorter(graph).static_order())
        except CycleError as error:
            raise SpaceError(f"dimensions depend on each other in a circle: {' -> '.join(error.args[1])}.") from error
        return tuple(path for path in order if path in self.dimensions)

    @cached_property
    def coordinates(self) -> dict[str, Coordinate]:
        """Path -> what a sampler sees, for every dimension in the order of `paths`; the same for every trial."""
        return {path: self.dimensions[path].coordinate for path in self.paths}

    # --- Fitting a configuration

    def check(self, config: BaseModel) -> None:
        """Raise SpaceError unless every path, reference and reachable value fits the configuration's type."""
        config_type, fixed = type(config), flatten(as_json(config))
        for path in self.paths:
            check_path(config_type, path)
        for path in self._order:
            dimension = self.dimensions[path]
            for reference in sorted(self._references[path]):
                self._check_reference(config_type, path, reference, fixed)
            for divisor in self._divisors(path, fixed):
                self._check_values(config_type, path, dimension, divisor)

    def _check_reference(
        self, config_type: type[BaseModel], path: str, reference: str, fixed: Mapping[str, Any]
    ) -> None:
        if reference not in self.dimensions:
            try:
                check_path(config_type, reference)
            except SpaceError as error:
                raise SpaceError(f"{path} depends on an {error}") from error
        for value in self.dimensions[path].conditions.get(reference, ()):
            if reference in self.dimensions:
                possible = self.dimensions[reference].may_be(value)
            else:
                possible = misfit(config_type, reference, value) is None
            if not possible:
                options = getattr(self.dimensions.get(reference), "options", ())
                hint = near(str(value), map(str, options))
                raise SpaceError(f"{path} asks for {reference}={value!r}, which never holds{hint or '.'}")

    def _check_values(self, config_type: type[BaseModel], path: str, dimension: Dimension, divisor: int) -> None:
        if isinstance(dimension, Int) and not len(dimension.allowed(divisor)):
            raise SpaceError(
                f"{path}: no value in [{dimension.low}, {dimension.high}] is a multiple of "
                f"{dimension.multiple_of}={divisor}; widen the range or narrow {dimension.multiple_of}."
            )
        for value in dimension.extremes(divisor):
            if reason := misfit(config_type, path, value):
                raise SpaceError(f"{path}: its value {value!r} does not fit the configuration: {reason}.")

    def _divisors(self, path: str, fixed: Mapping[str, Any]) -> Iterator[int]:
        """Every divisor that may meet the dimension; 1 where it has none. Raises SpaceError where one is no divisor."""
        reference = self.dimensions[path].divisor
        if reference is None:
            yield 1
            return
        source = self.dimensions.get(reference)
        values: list[Iterable[Any]] = []
        if isinstance(source, Int):
            if source.count > LISTED:
                raise SpaceError(
                    f"{path}: multiple_of={reference!r} may be any of {source.count} numbers, and each is looked at: "
                    f"narrow it to {LISTED}."
                )
            values.extend(source.allowed(divisor) for divisor in self._divisors(reference, fixed))
        elif isinstance(source, Choice):
            values.append(source.options)
        elif source is not None:
            raise SpaceError(
                f"{path}: multiple_of={reference!r} must name whole numbers, not a {type(source).__name__}."
            )
        # The field's own value counts where no dimension sets it, also while that dimension is inactive.
        own = {**self.dimensions[path].conditions}
        if source is None or any(own.get(key) != allowed for key, allowed in source.conditions.items()):
            values.append([fixed.get(reference)])
        for value in (value for group in values for value in group):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SpaceError(f"{path}: multiple_of needs {reference} to be a whole number from 1, not {value!r}.")
            yield value

    def pinned(self, paths: Iterable[str]) -> Space:
        """The space without the dimensions at `paths`, below them or above them."""
        fixed = [f"{path}." for path in paths]

        def meets(path: str) -> bool:
            return any(f"{path}.".startswith(pin) or pin.startswith(f"{path}.") for pin in fixed)

        return Space({path: dimension for path, dimension in self.dimensions.items() if not meets(path)}, self.fixed)

    def upto(self, tier: int) -> Space:
        """The space without the dimensions of a higher tier. Raises SpaceError where none is left, or there is no such
        tier."""
        kept = {path: dimension for path, dimension in self.dimensions.items() if dimension.tier <= tier}
        if not kept and self.dimensions:
            lowest = min(dimension.tier for dimension in self.dimensions.values())
            raise SpaceError(f"tier {tier} has no dimension: the lowest of this space is {lowest}.")
        highest = max((dimension.tier for dimension in self.dimensions.values()), default=tier)
        if tier > highest:
            raise SpaceError(f"tier {tier} has no dimension: the highest of this space is {highest}.")
        return Space(kept, self.fixed)

    def bound(self, config: BaseModel) -> Space:
        """The space within one configuration: fields that are no dimensions have the configuration's values.

        Dimensions whose conditions those values rule out are gone. A field that the configuration's chosen
        alternative lacks fulfils no condition.
        """
        values = flatten(as_json(config))
        live: dict[str, Dimension] = {}
        for path in self._order:
            conditions = self.dimensions[path].conditions
            if all(
                reference in live if reference in self.dimensions else among(values.get(reference, _NOTHING), allowed)
                for reference, allowed in conditions.items()
            ):
                live[path] = self.dimensions[path]
        named = set[str]().union(*(self._references[path] for path in live))
        return Space(
            {path: dimension for path, dimension in self.dimensions.items() if path in live},
            {path: values[path] for path in sorted(named) if path in values},
        )

    # --- Coordinates and parameters

    def from_unit(self, u: Sequence[float]) -> dict[str, Any]:
        """Coordinates at a point of the unit cube, `u: [len(paths)]`."""
        return {path: self.dimensions[path].from_unit(float(x)) for path, x in zip(self.paths, u, strict=True)}

    def guided(self, u: Sequence[float]) -> dict[str, Any]:
        """Coordinates at a point of the unit cube where priors count."""
        return {path: self.dimensions[path].guided(float(x)) for path, x in zip(self.paths, u, strict=True)}

    def encode(self, params: Mapping[str, Any], rest: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
        """Coordinates that decode to `params`; what these leave open lies where it does in `rest`.

        Raises SpaceError for a value that its dimension does not hold, and, if `strict`, where one is inactive there.
        """
        coordinates, known = dict(rest), dict[str, Any]()
        for path in self._order:
            dimension = self.dimensions[path]
            if not self._active(dimension, known, self.fixed):
                if strict and path in params:
                    raise SpaceError(f"{path} is not active there: it needs {_conditions(dimension)}.")
                continue
            divisor = self._divisor(dimension, known, self.fixed)
            if path in params:
                coordinates[path] = dimension.at(params[path], divisor)
                if coordinates[path] is None:
                    options = getattr(dimension, "options", ())
                    hint = near(str(params[path]), map(str, options)) or f": {_span(dimension)}."
                    raise SpaceError(f"{path}={params[path]!r} is not among the values that the space has there{hint}")
            known[path] = dimension.value(coordinates[path], divisor)
        return {path: coordinates[path] for path in self.paths}

    def decode(self, coordinates: Mapping[str, Any], fixed: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The parameters at `coordinates`: path -> JSON value, active dimensions only, in the order of `paths`.

        `fixed` gives the values of fields that conditions and divisors name, by default those of `bound`.
        """
        fixed = self.fixed if fixed is None else fixed
        params: dict[str, Any] = {}
        for path in self._order:
            dimension = self.dimensions[path]
            if self._active(dimension, params, fixed):
                params[path] = dimension.value(coordinates[path], self._divisor(dimension, params, fixed))
        return {path: params[path] for path in self.paths if path in params}

    def retained(self, coordinates: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
        """The coordinates of a trial with `params` that may be older than this space, as far as they are of it.

        A dimension that is new since, that has lost the trial's value, or is no longer active or inactive as it was
        there, has none; an option has the index it has now.
        """
        known = {path: value for path, value in params.items() if path in self.dimensions}
        found: dict[str, Any] = {}
        for path in (path for path in self.paths if path in coordinates):
            dimension, coordinate = self.dimensions[path], coordinates[path]
            if self._active(dimension, known, self.fixed) != (path in known):
                continue
            if path in known:
                coordinate = dimension.locate(coordinate, known[path], self._divisor(dimension, known, self.fixed))
            if coordinate is not None and dimension.holds(coordinate):
                found[path] = coordinate
        return found

    def _active(self, dimension: Dimension, params: Mapping[str, Any], fixed: Mapping[str, Any]) -> bool:
        return all(
            among((params if path in self.dimensions else fixed).get(path, _NOTHING), allowed)
            for path, allowed in dimension.conditions.items()
        )

    def _divisor(self, dimension: Dimension, params: Mapping[str, Any], fixed: Mapping[str, Any]) -> int:
        path = dimension.divisor
        return 1 if path is None else params[path] if path in params else fixed[path]

    def divisor(self, path: str, params: Mapping[str, Any]) -> int:
        """What the values of the dimension at `path` are multiples of where `params` stand; 1 where it has none."""
        return self._divisor(self.dimensions[path], params, self.fixed)

    # --- Grid

    def grid_size(self, points: int = 5) -> int:
        """How many distinct configurations the grid has; `points` per dimension without steps of its own."""
        return self._blocks(points)[-1][0]

    def grid(self, number: int, points: int = 5) -> dict[str, Any]:
        """Coordinates of grid point `number` in 0 .. grid_size - 1; inactive dimensions never multiply points."""
        blocks = self._blocks(points)
        if not 0 <= number < blocks[-1][0]:
            raise IndexError(f"grid point {number} of {blocks[-1][0]}")
        end, decided, axes = blocks[bisect_right(blocks, number, key=lambda block: block[0])]
        rest = number - (end - math.prod(len(axis) for axis in axes.values()))
        coordinates = {path: dimension.from_unit(0.0) for path, dimension in self.dimensions.items()} | decided
        for path in reversed(axes):
            rest, index = divmod(rest, len(axes[path]))
            coordinates[path] = axes[path][index]
        return {path: coordinates[path] for path in self.paths}

    @cached_property
    def _grids(self) -> dict[int, list[tuple[int, dict[str, Any], dict[str, Sequence[Any]]]]]:
        return {}

    def _blocks(self, points: int) -> list[tuple[int, dict[str, Any], dict[str, Sequence[Any]]]]:
        """(end, coordinates of the dimensions others depend on, axes of the other active ones), by grid number."""
        if points not in self._grids:
            deciding = set[str]().union(*self._references.values())
            parts: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {})]  # coordinates and parameters so far
            for path in (path for path in self._order if path in deciding):
                parts = list(self._split(path, parts, points))
                if len(parts) > 100_000:
                    raise SpaceError(f"the grid branches {len(parts)} times by {path}; use steps or another sampler.")
            axes = [
                {
                    path: self._axis(path, params, points)[1]
                    for path in self.paths
                    if path not in deciding and self._active(self.dimensions[path], params, self.fixed)
                }
                for _, params in parts
            ]
            ends = accumulate(math.prod(len(axis) for axis in block.values()) for block in axes)
            self._grids[points] = [
                (end, decided, block) for end, (decided, _), block in zip(ends, parts, axes, strict=True)
            ]
        return self._grids[points]

    def _axis(self, path: str, params: Mapping[str, Any], points: int) -> tuple[int, Sequence[Any]]:
        """(what divides the values, the coordinates of the grid) of the dimension at `path` where `params` stand."""
        dimension = self.dimensions[path]
        if getattr(dimension, "step", 1) not in (None, 1) and dimension.count > LISTED:
            raise SpaceError(f"{path} has {dimension.count} values, too many for a grid: widen its step, or drop it.")
        divisor = self._divisor(dimension, params, self.fixed)
        return divisor, dimension.grid(points, divisor)

    def _split(
        self, path: str, parts: list[tuple[dict[str, Any], dict[str, Any]]], points: int
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        dimension = self.dimensions[path]
        for coordinates, params in parts:
            if not self._active(dimension, params, self.fixed):
                yield coordinates, params
                continue
            divisor, axis = self._axis(path, params, points)
            for coordinate in axis:
                value = dimension.value(coordinate, divisor)
                yield {**coordinates, path: coordinate}, {**params, path: value}

    def describe(self) -> dict[str, Any]:
        """The declaration as JSON values, the same however it was ordered."""
        return {path: self.dimensions[path].describe() for path in self.paths}


def _span(dimension: Dimension) -> str:  # what it can be, in words
    if isinstance(dimension, Choice):
        return ", ".join(map(repr, dimension.options))
    assert isinstance(dimension, Int | Float)
    step = f" in steps of {dimension.step}" if dimension.step not in (None, 1) else ""
    if isinstance(dimension, Int):
        step += ", powers of two" if dimension.powers_of_two else ""
        step += f", multiples of {dimension.multiple_of}" if dimension.multiple_of else ""
    return f"{dimension.low} to {dimension.high}{step}"


def _conditions(dimension: Dimension) -> str:
    return " and ".join(f"{path}={' or '.join(map(repr, values))}" for path, values in dimension.conditions.items())


_NOTHING = object()
