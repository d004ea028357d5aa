"""Defines search spaces: dimensions of a typed configuration, conditional and dependent ones, valid by construction.

A sampler sees one fixed coordinate per dimension, whether or not the dimension is active, so its space never changes
from trial to trial. `decode` turns coordinates into parameters: it drops inactive dimensions and reads a dependent one
(`multiple_of`, or named by a linear rule) from the unit interval among the values that are left there. Points are drawn
again only if a rule that is not linear does not hold (hpo.search.samplers.reject).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as _field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any

from pydantic import BaseModel

from hpo.errors import SpaceError
from hpo.space.config import as_json, flatten
from hpo.space.dimension import Coordinate, Dimension
from hpo.space.dimensions import Bool, Choice, Float, Int
from hpo.space.error_list import raise_all
from hpo.space.grid import Grid
from hpo.space.rules import Rule, members, narrowed, nearest, parsed
from hpo.space.values import among
from hpo.text import near

__all__ = ["Bool", "Choice", "Coordinate", "Dimension", "Float", "Int", "Space"]


@dataclass(frozen=True)
class Space:
    """Dimensions by dotted path, in any order, with the values of other fields that they refer to, and rules.

    Conditions, divisors and rules (hpo.space.rules) may refer to other fields. A rule that names an inactive dimension
    does not apply. Raises SpaceError, which names every mistake, if dimensions or rules are declared wrongly or
    references form a cycle. `hpo.space.config_check.check` checks that the dimensions fit a configuration; `bound` then
    fixes the other fields.
    """

    dimensions: Mapping[str, Dimension]
    fixed: Mapping[str, Any] = _field(default_factory=dict[str, Any])
    rules: Sequence[str] = ()

    def __post_init__(self) -> None:
        raise_all(_mistakes(self.dimensions, self.rules))
        dimensions = {path: dimension.set_relative(path in self._solved) for path, dimension in self.dimensions.items()}
        object.__setattr__(self, "dimensions", dimensions)
        _ = self.order

    def __len__(self) -> int:
        return len(self.dimensions)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Returns all paths, sorted: the order of the unit cube's axes."""
        return tuple(sorted(self.dimensions))

    @cached_property
    def _references(self) -> dict[str, set[str]]:
        """Returns path -> paths of the dimensions and fields that the dimension there depends on."""
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
        """Returns path -> rules that are enforced while the dimension there is decoded."""
        return members(self.rules_read, self.dimensions)

    def references(self, path: str) -> set[str]:
        """Returns the paths of the dimensions and fields that the dimension at `path` depends on."""
        return self._references[path]

    @cached_property
    def has_priors(self) -> bool:
        return any(dimension.has_prior for dimension in self.dimensions.values())

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
        """Returns path -> coordinate that a sampler sees, in the order of `paths`; the same for every trial."""
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

    def following(self, densities: Mapping[str, str]) -> Space:
        """Returns the space whose dimensions at these paths follow the densities of these names."""
        if not densities:
            return self
        drawn = {
            path: dimension.following(densities[path])
            for path, dimension in self.dimensions.items()
            if path in densities
        }
        return Space({**self.dimensions, **drawn}, self.fixed, self.rules)

    def upto(self, tier: int) -> Space:
        """Returns the space without the dimensions of a higher tier.

        Raises SpaceError if none is left, and for a tier above the highest.
        """
        kept = {path: dimension for path, dimension in self.dimensions.items() if dimension.tier <= tier}
        if not kept and self.dimensions:
            lowest = min(dimension.tier for dimension in self.dimensions.values())
            raise SpaceError(f"tier {tier} has no dimension: the lowest of this space is {lowest}.")
        highest = max((dimension.tier for dimension in self.dimensions.values()), default=tier)
        if tier > highest:
            raise SpaceError(f"tier {tier} has no dimension: the highest of this space is {highest}.")
        return Space(kept, self.fixed, self.rules)

    def bound(self, config: BaseModel) -> Space:
        """Returns the space within one configuration, which fixes all fields that are not dimensions.

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
        """Returns the coordinates at a point of the unit cube, following priors."""
        return {path: self.dimensions[path].guided(float(x)) for path, x in zip(self.paths, u, strict=True)}

    def encode(self, params: Mapping[str, Any], rest: Mapping[str, Any], *, strict: bool = True) -> dict[str, Any]:
        """Returns coordinates that decode to `params`; dimensions that `params` lacks keep their coordinates of `rest`.

        Raises SpaceError for a value that its dimension does not hold, and, if `strict`, for one of an inactive
        dimension.
        """
        coordinates, known = dict(rest), dict[str, Any]()
        for path in self.order:
            dimension = self.dimensions[path]
            if not self.is_active(path, known):
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
            known[path] = self.value_at(path, coordinates[path], known)
        return {path: coordinates[path] for path in self.paths}

    def decode(self, coordinates: Mapping[str, Any], fixed: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the parameters at `coordinates`: path -> JSON value, active dimensions only, in the order of `paths`.

        `fixed` gives the values of fields that conditions and divisors name, by default those of `bound`.
        """
        fixed = self.fixed if fixed is None else fixed
        params: dict[str, Any] = {}
        for path in self.order:
            if self.is_active(path, params, fixed):
                params[path] = self.value_at(path, coordinates[path], params, fixed)
        return {path: params[path] for path in self.paths if path in params}

    def retained(self, coordinates: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the coordinates that fit this space, of a trial with `params` that may be older than the space.

        A dimension has none if it is newer than the trial, no longer has the trial's value, or has changed between
        active and inactive. An option gets its present index.
        """
        known = {path: value for path, value in params.items() if path in self.dimensions}
        fitting: dict[str, Any] = {}
        for path in (path for path in self.paths if path in coordinates):
            dimension, coordinate = self.dimensions[path], coordinates[path]
            if self.is_active(path, known) != (path in known):
                continue
            if path in known:
                before = {other: known[other] for other in self._references[path] & known.keys()}
                there, divisor = self._there(path, before, self.fixed)
                coordinate = there.locate(coordinate, known[path], divisor)
            if coordinate is not None and dimension.holds(coordinate):
                fitting[path] = coordinate
        return fitting

    def is_active(self, path: str, params: Mapping[str, Any], fixed: Mapping[str, Any] | None = None) -> bool:
        """Returns True if `params` and the `fixed` values of other fields fulfil the dimension's conditions."""
        fixed = self.fixed if fixed is None else fixed
        return all(
            among((params if other in self.dimensions else fixed).get(other, _NOTHING), allowed)
            for other, allowed in self.dimensions[path].conditions.items()
        )

    def there(self, path: str, params: Mapping[str, Any]) -> tuple[Dimension, int]:
        """Returns the dimension at `path`, limited to the values that the rules allow beside `params`, and their
        divisor, which is 1 if they need not be multiples."""
        before = {other: params[other] for other in self._references[path] & params.keys()}
        return self._there(path, before, self.fixed)

    def _there(self, path: str, before: Mapping[str, Any], fixed: Mapping[str, Any]) -> tuple[Dimension, int]:
        """Returns the same as `there`; `before` has only parameters that precede the dimension in `order`."""
        dimension = self.dimensions[path]
        named = dimension.divisor
        divisor = 1 if named is None else before[named] if named in before else fixed[named]
        if (rules := self._solved.get(path)) is None:
            return dimension, divisor
        ruled = {other for rule in rules for other in rule.paths}
        numbers: dict[str, Any] = {other: self.dimensions[other] for other in ruled & self.dimensions.keys()}
        return narrowed(path, rules, numbers, self._fields(before, fixed)) or dimension, divisor

    def value_at(
        self, path: str, coordinate: Any, before: Mapping[str, Any], fixed: Mapping[str, Any] | None = None
    ) -> Any:
        """Returns the parameter at a coordinate, beside the parameters `before` it in `order`."""
        fixed = self.fixed if fixed is None else fixed
        dimension, divisor = self._there(path, before, fixed)
        value, rules = dimension.value(coordinate, divisor), self._solved.get(path, ())
        if not rules or not isinstance(dimension, Float) or dimension.step is not None:
            return value
        known = self._fields(before, fixed)

        def keeps(tried: float) -> bool:
            return not any(rule.fault(known | {path: tried}) for rule in rules)

        return nearest(value, dimension.low, dimension.high, keeps)

    def fault(self, params: Mapping[str, Any], fixed: Mapping[str, Any] | None = None) -> str:
        """Returns a clause about the rule that the decoded parameters break; empty if they satisfy all."""
        values = self._fields(params, self.fixed if fixed is None else fixed)
        return next((fault for rule in self.rules_read if (fault := rule.fault(values))), "")

    def _fields(self, params: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
        return {**{path: value for path, value in fixed.items() if path not in self.dimensions}, **params}

    def broken(self, coordinates: Mapping[str, Any]) -> list[str]:
        """Returns the sorted dimensions that are named by the rules broken at `coordinates` and by rules linked to
        these."""
        params = self.decode(coordinates)
        values = self._fields(params, self.fixed)
        named = {path for rule in self.rules_read if rule.fault(values) for path in rule.paths}
        for _ in self.rules_read:
            named = named.union(*(rule.paths for rule in self.rules_read if not named.isdisjoint(rule.paths)))
        return [path for path in self.paths if path in named]

    @cached_property
    def rejects(self) -> bool:
        """Returns True if a point of the space may break a rule, since not all rules hold by construction."""
        solved = {rule.text for rules in self._solved.values() for rule in rules}
        return any(rule.text not in solved for rule in self.rules_read) or len(solved) > 1

    def grid(self, points: int = 5) -> Grid:
        """Returns the grid with `points` values for each dimension that has no steps."""
        if points not in self._grids:
            self._grids[points] = Grid(self, points)
        return self._grids[points]

    @cached_property
    def _grids(self) -> dict[int, Grid]:
        return {}

    def describe(self) -> dict[str, Any]:
        """Returns the declaration as JSON values, in an order independent of how it was written."""
        return {path: self.dimensions[path].describe() for path in self.paths}


def _mistakes(dimensions: Mapping[str, Dimension], rules: Sequence[str]) -> Iterator[str]:
    """Yields a sentence for each dimension and rule that is declared wrongly."""
    for path, dimension in dict[str, object](dimensions).items():
        if not isinstance(dimension, Dimension):
            yield f"{path}: {dimension!r} is not a dimension; use Float, Int, Choice or Bool."
            continue
        faults = list(dimension.faults()) or dimension.prior_faults()
        yield from (f"{path}: {fault}{'' if fault.endswith('?') else '.'}" for fault in faults)
    for path in dimensions:
        parts = path.split(".")
        for end in range(1, len(parts)):
            if (parent := ".".join(parts[:end])) in dimensions:
                yield f"{path} is a part of {parent}, which is a dimension too; keep one of them."
    for text in rules:
        try:
            parsed(text)
        except SpaceError as error:
            yield str(error)


def _conditions(dimension: Dimension) -> str:
    return " and ".join(f"{path}={' or '.join(map(repr, values))}" for path, values in dimension.conditions.items())


_NOTHING = object()
