"""Search spaces: dimensions of a typed configuration, conditional and dependent ones, valid by construction.

A sampler sees one fixed coordinate per dimension, whether or not the dimension is active, so its space never
changes from trial to trial. `decode` turns coordinates into parameters: it drops inactive dimensions and reads a
dependent one (`multiple_of`, or named by a linear rule) from the unit interval among the values that are left there.
Nothing is ever redrawn but where a rule that is not linear does not hold (hpo.search.samplers.reject).
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
from hpo.space.config import as_json, flatten
from hpo.space.dimension import Coordinate, Dimension
from hpo.space.dimensions import Bool, Choice, Float, Int
from hpo.space.mistakes import raise_all
from hpo.space.rules import Rule, members, narrowed, nearest, parsed
from hpo.space.values import LISTED, among
from hpo.text import near

__all__ = ["Bool", "Choice", "Coordinate", "Dimension", "Float", "Int", "Space"]


@dataclass(frozen=True)
class Space:
    """Dimensions by dotted path, in any order, the values of the fields their conditions, divisors and rules name, and
    rules between fields (hpo.space.rules). A rule that names an inactive dimension asks nothing there.

    Raises SpaceError, which names every mistake, where dimensions or rules are declared wrongly or references form a
    cycle. Whether the dimensions fit a configuration is asked with `hpo.space.fit.check`; `bound` then fixes the fields
    that are no dimensions.
    """

    dimensions: Mapping[str, Dimension]
    fixed: Mapping[str, Any] = _field(default_factory=dict[str, Any])
    rules: Sequence[str] = ()

    def __post_init__(self) -> None:
        raise_all(self._mistakes())
        dimensions = {path: dimension.set_relative(path in self._solved) for path, dimension in self.dimensions.items()}
        object.__setattr__(self, "dimensions", dimensions)
        _ = self.order

    def _mistakes(self) -> Iterator[str]:
        for path, dimension in dict[str, object](self.dimensions).items():
            if not isinstance(dimension, Dimension):
                yield f"{path}: {dimension!r} is not a dimension; use Float, Int, Choice or Bool."
                continue
            faults = list(dimension.faults())
            yield from (f"{path}: {fault}." for fault in faults)
            if not faults and dimension.prior is not None and dimension.at(dimension.prior) is None:
                yield f"{path}: prior={dimension.prior!r} is not among its values."
        for path in self.dimensions:
            parts = path.split(".")
            for end in range(1, len(parts)):
                if (parent := ".".join(parts[:end])) in self.dimensions:
                    yield f"{path} is a part of {parent}, which is a dimension too; keep one of them."
        for text in self.rules:
            try:
                parsed(text)
            except SpaceError as error:
                yield str(error)

    def __len__(self) -> int:
        return len(self.dimensions)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Returns all paths, sorted: the order of the unit cube's axes."""
        return tuple(sorted(self.dimensions))

    @cached_property
    def _references(self) -> dict[str, set[str]]:
        """Returns, by path, the paths of the dimensions and fields that the dimension there depends on."""
        references = {path: dimension.named for path, dimension in self.dimensions.items()}
        for path, rules in self._solved.items():  # by its rules it depends on those before it in the order of `paths`
            solved = {other for rule in rules for other in rule.paths if other in self._solved}
            references[path] |= {other for other in solved if other < path}
        return references

    @cached_property
    def rules_read(self) -> tuple[Rule, ...]:
        return tuple(parsed(text) for text in self.rules)

    @cached_property
    def _solved(self) -> dict[str, list[Rule]]:
        """Returns, by path, the rules that are kept while the dimension there is decoded."""
        return members(self.rules_read, self.dimensions)

    def references(self, path: str) -> set[str]:
        """Returns the paths of the dimensions and fields that the dimension at `path` depends on."""
        return self._references[path]

    @cached_property
    def has_priors(self) -> bool:
        return any(dimension.prior is not None for dimension in self.dimensions.values())

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Returns the paths in an order in which each comes after those that it depends on."""
        graph = {path: sorted(self._references[path]) for path in self.paths}
        try:
            order = tuple(TopologicalSorter(graph).static_order())
        except CycleError as error:
            raise SpaceError(f"dimensions depend on each other in a circle: {' -> '.join(error.args[1])}.") from error
        return tuple(path for path in order if path in self.dimensions)

    @cached_property
    def coordinates(self) -> dict[str, Coordinate]:
        """Returns, by path, the coordinates that a sampler sees, in the order of `paths`; the same for every trial."""
        return {path: self.dimensions[path].coordinate for path in self.paths}

    # --- A part of the space

    def pinned(self, paths: Iterable[str]) -> Space:
        """Returns the space without the dimensions at `paths`, below them or above them."""
        fixed = [f"{path}." for path in paths]

        def meets(path: str) -> bool:
            return any(f"{path}.".startswith(pin) or pin.startswith(f"{path}.") for pin in fixed)

        return Space(
            {path: dimension for path, dimension in self.dimensions.items() if not meets(path)}, self.fixed, self.rules
        )

    def upto(self, tier: int) -> Space:
        """Returns the space without the dimensions of a higher tier. Raises SpaceError where none is left, and for a
        tier above the highest."""
        kept = {path: dimension for path, dimension in self.dimensions.items() if dimension.tier <= tier}
        if not kept and self.dimensions:
            lowest = min(dimension.tier for dimension in self.dimensions.values())
            raise SpaceError(f"tier {tier} has no dimension: the lowest of this space is {lowest}.")
        highest = max((dimension.tier for dimension in self.dimensions.values()), default=tier)
        if tier > highest:
            raise SpaceError(f"tier {tier} has no dimension: the highest of this space is {highest}.")
        return Space(kept, self.fixed, self.rules)

    def bound(self, config: BaseModel) -> Space:
        """Returns the space within one configuration, whose values all fields have that are not dimensions.

        It lacks the dimensions whose conditions these values rule out. A field that the configuration's chosen
        alternative lacks fulfils no condition.
        """
        values = flatten(as_json(config))
        live: dict[str, Dimension] = {}
        for path in self.order:
            conditions = self.dimensions[path].conditions
            if all(
                reference in live if reference in self.dimensions else among(values.get(reference, _NOTHING), allowed)
                for reference, allowed in conditions.items()
            ):
                live[path] = self.dimensions[path]
        named = set[str]().union(*(self._references[path] for path in live))
        fields = values.keys() - self.dimensions.keys() | live.keys()
        rules = [
            rule for rule in self.rules_read if fields.issuperset(rule.paths) and not live.keys().isdisjoint(rule.paths)
        ]
        named = named.union(*(rule.paths for rule in rules))
        return Space(
            {path: dimension for path, dimension in self.dimensions.items() if path in live},
            {path: values[path] for path in sorted(named) if path in values},
            tuple(rule.text for rule in rules),
        )

    # --- Coordinates and parameters

    def from_unit(self, u: Sequence[float]) -> dict[str, Any]:
        """Returns the coordinates at a point of the unit cube, `u: [len(paths)]`."""
        return {path: self.dimensions[path].from_unit(float(x)) for path, x in zip(self.paths, u, strict=True)}

    def guided(self, u: Sequence[float]) -> dict[str, Any]:
        """Returns the coordinates at a point of the unit cube where priors count."""
        return {path: self.dimensions[path].guided(float(x)) for path, x in zip(self.paths, u, strict=True)}

    def encode(self, params: Mapping[str, Any], rest: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
        """Returns coordinates that decode to `params`; dimensions that `params` lacks keep their coordinates of `rest`.

        Raises SpaceError for a value that its dimension does not hold, and, if `strict`, for one of an inactive
        dimension.
        """
        coordinates, known = dict(rest), dict[str, Any]()
        for path in self.order:
            dimension = self.dimensions[path]
            if not self._active(dimension, known, self.fixed):
                if strict and path in params:
                    raise SpaceError(f"{path} is not active there: it needs {_conditions(dimension)}.")
                continue
            dimension, divisor = self._there(path, known, self.fixed)
            if path in params:
                coordinates[path] = dimension.at(params[path], divisor)
                if coordinates[path] is None:
                    options = getattr(dimension, "options", ())
                    hint = near(str(params[path]), map(str, options)) or f": {dimension.span}."
                    raise SpaceError(f"{path}={params[path]!r} is not among the values that the space has there{hint}")
            known[path] = self._value(path, coordinates[path], known, self.fixed)
        return {path: coordinates[path] for path in self.paths}

    def decode(self, coordinates: Mapping[str, Any], fixed: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the parameters at `coordinates`: path -> JSON value, active dimensions only, in the order of `paths`.

        `fixed` gives the values of fields that conditions and divisors name, by default those of `bound`.
        """
        fixed = self.fixed if fixed is None else fixed
        params: dict[str, Any] = {}
        for path in self.order:
            dimension = self.dimensions[path]
            if self._active(dimension, params, fixed):
                params[path] = self._value(path, coordinates[path], params, fixed)
        return {path: params[path] for path in self.paths if path in params}

    def retained(self, coordinates: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those coordinates of a trial with `params`, which may be older than this space, that fit this space.

        A dimension has none if it is newer than the trial, no longer has the trial's value, or is active where it was
        inactive, or the reverse. An option has its present index.
        """
        known = {path: value for path, value in params.items() if path in self.dimensions}
        fitting: dict[str, Any] = {}
        for path in (path for path in self.paths if path in coordinates):
            dimension, coordinate = self.dimensions[path], coordinates[path]
            if self._active(dimension, known, self.fixed) != (path in known):
                continue
            if path in known:
                before = {other: known[other] for other in self._references[path] & known.keys()}
                there, divisor = self._there(path, before, self.fixed)
                coordinate = there.locate(coordinate, known[path], divisor)
            if coordinate is not None and dimension.holds(coordinate):
                fitting[path] = coordinate
        return fitting

    def _active(self, dimension: Dimension, params: Mapping[str, Any], fixed: Mapping[str, Any]) -> bool:
        return all(
            among((params if path in self.dimensions else fixed).get(path, _NOTHING), allowed)
            for path, allowed in dimension.conditions.items()
        )

    def _divisor(self, dimension: Dimension, params: Mapping[str, Any], fixed: Mapping[str, Any]) -> int:
        path = dimension.divisor
        return 1 if path is None else params[path] if path in params else fixed[path]

    def there(self, path: str, params: Mapping[str, Any]) -> tuple[Dimension, int]:
        """Returns the dimension at `path` with the values that the rules leave for it beside `params`, and their
        divisor, which is 1 where they need not be multiples."""
        before = {other: params[other] for other in self._references[path] & params.keys()}
        return self._there(path, before, self.fixed)

    def _there(self, path: str, before: Mapping[str, Any], fixed: Mapping[str, Any]) -> tuple[Dimension, int]:
        """Does the work of `there`; `before` has only parameters that precede the dimension in `order`."""
        dimension = self.dimensions[path]
        divisor = self._divisor(dimension, before, fixed)
        if (rules := self._solved.get(path)) is None:
            return dimension, divisor
        named = {other for rule in rules for other in rule.paths}
        numbers: dict[str, Any] = {other: self.dimensions[other] for other in named & self.dimensions.keys()}
        return narrowed(path, rules, numbers, self._fields(before, fixed)) or dimension, divisor

    def _value(self, path: str, coordinate: Any, before: Mapping[str, Any], fixed: Mapping[str, Any]) -> Any:
        """Returns the parameter at a coordinate, beside the parameters `before` it."""
        dimension, divisor = self._there(path, before, fixed)
        value, rules = dimension.value(coordinate, divisor), self._solved.get(path, ())
        if not rules or not isinstance(dimension, Float) or dimension.step is not None:
            return value
        known = self._fields(before, fixed)

        def keeps(tried: float) -> bool:
            return not any(rule.fault(known | {path: tried}) for rule in rules)

        return nearest(value, dimension.low, dimension.high, keeps)

    def fault(self, params: Mapping[str, Any], fixed: Mapping[str, Any] | None = None) -> str:
        """Returns a clause that says which rule the decoded parameters break; empty where they keep to all."""
        values = self._fields(params, self.fixed if fixed is None else fixed)
        return next((fault for rule in self.rules_read if (fault := rule.fault(values))), "")

    def _fields(self, params: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
        return {**{path: value for path, value in fixed.items() if path not in self.dimensions}, **params}

    def broken(self, coordinates: Mapping[str, Any]) -> list[str]:
        """Returns the dimensions, sorted, that the rules broken at `coordinates` and the rules linked to them name."""
        params = self.decode(coordinates)
        values = self._fields(params, self.fixed)
        named = {path for rule in self.rules_read if rule.fault(values) for path in rule.paths}
        for _ in self.rules_read:
            named = named.union(*(rule.paths for rule in self.rules_read if not named.isdisjoint(rule.paths)))
        return [path for path in self.paths if path in named]

    # --- Grid

    def grid_size(self, points: int = 5) -> int:
        """Returns the number of distinct configurations of the grid, with `points` for each dimension without steps."""
        whole = self._blocks(points)[-1][0]
        return len(self._kept(whole, points)) if self.rejects else whole

    def grid_ends(self, number: int, points: int = 5) -> bool:
        """Returns true where the grid ends before point `number`; with rules this is quicker than `grid_size`."""
        return len(self._kept(number, points)) <= number if self.rejects else number >= self.grid_size(points)

    def grid(self, number: int, points: int = 5) -> dict[str, Any]:
        """Returns the coordinates of grid point `number` in 0 .. grid_size - 1; inactive dimensions add no points."""
        if number < 0 or self.grid_ends(number, points):
            raise IndexError(f"grid point {number} of {self.grid_size(points)}")
        return self._grid_point(self._kept(number, points)[number] if self.rejects else number, points)

    def _kept(self, number: int, points: int) -> list[int]:
        """Returns the points of the whole grid at which all rules hold, at least up to index `number` among them."""
        kept, rest = self._kept_points.setdefault(points, ([], iter(range(self._blocks(points)[-1][0]))))
        last = kept[-1] if kept else 0
        while len(kept) <= number and (place := next(rest, None)) is not None:
            if not self.fault(self.decode(self._grid_point(place, points))):
                kept.append(place)
                last = place
            if place - last > LISTED:
                raise SpaceError(f"of {LISTED} points of the grid none keeps to the rules: choose another sampler.")
        return kept

    @cached_property
    def rejects(self) -> bool:
        """Returns true where a point of the space may break a rule, since not all are kept by construction."""
        solved = {rule.text for rules in self._solved.values() for rule in rules}
        return any(rule.text not in solved for rule in self.rules_read) or len(solved) > 1

    def _grid_point(self, number: int, points: int) -> dict[str, Any]:
        blocks = self._blocks(points)
        end, decided, axes = blocks[bisect_right(blocks, number, key=lambda block: block[0])]
        rest = number - (end - math.prod(len(axis) for axis in axes.values()))
        coordinates = {path: dimension.from_unit(0.0) for path, dimension in self.dimensions.items()} | decided
        for path in reversed(axes):
            rest, index = divmod(rest, len(axes[path]))
            coordinates[path] = axes[path][index]
        return {path: coordinates[path] for path in self.paths}

    @cached_property
    def _kept_points(self) -> dict[int, tuple[list[int], Iterator[int]]]:
        return {}

    @cached_property
    def _grids(self) -> dict[int, list[tuple[int, dict[str, Any], dict[str, Sequence[Any]]]]]:
        return {}

    def _blocks(self, points: int) -> list[tuple[int, dict[str, Any], dict[str, Sequence[Any]]]]:
        """Returns (end, coordinates of the dimensions others depend on, axes of the other active ones), in order."""
        if points not in self._grids:
            deciding = set[str]().union(*self._references.values())
            parts: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {})]  # coordinates and parameters so far
            for path in (path for path in self.order if path in deciding):
                parts = list(self._split(path, parts, points))
                if len(parts) > LISTED:
                    raise SpaceError(f"the grid branches {len(parts)} times by {path}; use steps or another sampler.")
            axes = [
                {
                    path: self._axis(path, params, points)
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

    def _split(
        self, path: str, parts: list[tuple[dict[str, Any], dict[str, Any]]], points: int
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        dimension = self.dimensions[path]
        for coordinates, params in parts:
            if not self._active(dimension, params, self.fixed):
                yield coordinates, params
                continue
            for coordinate in self._axis(path, params, points):
                value = self._value(path, coordinate, params, self.fixed)
                yield {**coordinates, path: coordinate}, {**params, path: value}

    def _axis(self, path: str, params: Mapping[str, Any], points: int) -> Sequence[Any]:
        dimension, divisor = self._there(path, params, self.fixed)
        if getattr(dimension, "step", 1) not in (None, 1) and dimension.count > LISTED:
            raise SpaceError(f"{path} has {dimension.count} values, too many for a grid: widen its step, or drop it.")
        return dimension.grid(points, divisor)

    def describe(self) -> dict[str, Any]:
        """Returns the declaration as JSON values, whatever the order in which it was written."""
        return {path: self.dimensions[path].describe() for path in self.paths}


def _conditions(dimension: Dimension) -> str:
    return " and ".join(f"{path}={' or '.join(map(repr, values))}" for path, values in dimension.conditions.items())


_NOTHING = object()
