"""The base of a search space's dimensions, which turn coordinates into values.

A dimension has a coordinate, which a sampler draws, and a value, which a configuration gets. They differ where the
coordinate has a scale of its own: the exponent of a power of two, the index of an option, a point of the unit
interval for values that depend on another dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any, Self

from hpo.space.values import is_number, plain
from trainer.quote import quoted
from trainer.report import Json

# What a sampler sees of a dimension: ("float", low, high, log, step), ("int", low, high, log, step),
# ("choice", n) for 0 .. n-1, or ("unit",) for the interval [0, 1].
Coordinate = tuple[Any, ...]

_SPREAD = 0.1  # the standard deviation of draws around a prior, as a share of the range


@dataclass(frozen=True)
class Dimension(ABC):
    """The base class of all dimensions.

    tier       1 matters most; `--tier N` searches the dimensions up to N and leaves the others as they are configured.
    when       {path: value or several values}: active only while every named dimension or field has one of them.
    prior      the value that is believed to be good, around which random draws gather; see `guided`.
    strength   the share of draws that follow the prior, the others being uniform: above 0, at most 1.

    `relative`, which a Space sets where its rules need it, makes the coordinate a point of the unit interval, among the
    values that the rules leave for the dimension.
    """

    tier: int = field(default=1, kw_only=True)
    when: Mapping[str, Json | set[Any] | frozenset[Any]] | None = field(default=None, kw_only=True)
    prior: Any = field(default=None, kw_only=True)
    strength: float = field(default=0.5, kw_only=True)
    relative: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, plain(getattr(self, f.name)))

    @cached_property
    def conditions(self) -> dict[str, tuple[Any, ...]]:
        return {
            path: tuple(values) if isinstance(values, set | frozenset | tuple | list) else (values,)
            for path, values in (self.when or {}).items()
        }

    @property
    def divisor(self) -> str | None:
        """Returns the path of the number that must divide every value, or None."""
        return None

    @property
    def named(self) -> set[str]:
        """Returns the paths that its conditions and its divisor name."""
        return {*self.conditions, *([self.divisor] if self.divisor else [])}

    @property
    @abstractmethod
    def coordinate(self) -> Coordinate: ...

    @property
    @abstractmethod
    def count(self) -> float:
        """Returns the number of values, whatever the divisor; infinite without a step."""

    def faults(self) -> Iterator[str]:
        """Yields the mistakes of the declaration, in words that follow the dimension's name."""
        if not is_number(self.tier, int) or self.tier < 1:
            yield f"tier={quoted(self.tier)} must be a whole number from 1"
        yield from (f"when names no value for {path!r}" for path, values in self.conditions.items() if not values)
        if not is_number(self.strength, (int, float)) or not 0 < self.strength <= 1:
            yield f"strength={quoted(self.strength)} must be above 0 and at most 1"

    @abstractmethod
    def from_unit(self, u: float) -> Any:
        """Returns the coordinate at `u` in [0, 1]."""

    def guided(self, u: float) -> Any:
        """Returns the coordinate at `u` in [0, 1] of a mixture with the prior, as in Mallik et al. 2023 ("PriorBand").

        With probability `strength` it is the prior's option, or a normal draw around the prior, cut off at the ends,
        with a tenth of the (logarithmic) range as its standard deviation; else it is uniform.
        """
        if self.prior is None:
            return self.from_unit(u)
        if u >= self.strength:
            return self.from_unit((u - self.strength) / (1 - self.strength))
        return self.from_unit(self._around(self.to_unit(self.at(self.prior)), u / self.strength))

    def _around(self, centre: float, v: float) -> float:  # below which a share `v` of the draws around it lies
        normal = NormalDist(centre, _SPREAD)
        low, high = normal.cdf(0.0), normal.cdf(1.0)
        return min(max(normal.inv_cdf(min(low + v * (high - low), 1 - 1e-12)), 0.0), 1.0)

    @abstractmethod
    def to_unit(self, coordinate: Any) -> float:
        """Returns the middle of the points of [0, 1] that `from_unit` maps to the coordinate."""

    @abstractmethod
    def value(self, coordinate: Any, divisor: int = 1) -> Any:
        """Returns the parameter at a coordinate."""

    def holds(self, coordinate: Any) -> bool:
        """Returns true where a sampler could draw the coordinate."""
        kind, *rest = self.coordinate
        if kind == "choice":
            return coordinate in range(rest[0])
        low, high, _, step = (0.0, 1.0, False, None) if kind == "unit" else rest
        return low <= coordinate <= high and (kind != "int" or (coordinate - low) % step == 0)

    def locate(self, coordinate: Any, value: Any, divisor: int = 1) -> Any:
        """Returns the coordinate of `value`, which an older form of the dimension had at `coordinate`, or None."""
        return coordinate if self.holds(coordinate) and self.value(coordinate, divisor) == value else None

    @abstractmethod
    def at(self, value: Any, divisor: int = 1) -> Any:
        """Returns a coordinate of `value`; None where the dimension does not hold it."""

    @abstractmethod
    def extremes(self, divisor: int = 1) -> Sequence[Any]:
        """Returns values such that the field accepts all values if it accepts these."""

    @abstractmethod
    def grid(self, points: int, divisor: int = 1) -> Sequence[Any]:
        """Returns the coordinates of a grid: every value where there is a step, else `points` evenly spread ones."""

    def set_relative(self, relative: bool) -> Self:
        """Returns the same dimension with its coordinate made relative or not."""
        return self if self.relative == relative else self._changed(relative)

    def _changed(self, relative: bool, **changes: Any) -> Self:
        made = replace(self, **changes)
        object.__setattr__(made, "relative", relative)
        return made

    @property
    def span(self) -> str:
        """Returns the possible values in words."""
        return ""

    @abstractmethod
    def may_be(self, value: Any) -> bool:
        """Returns true where the dimension can take `value`, which a condition names."""

    def describe(self) -> dict[str, Any]:
        """Returns the declaration as JSON values."""
        shared = [f.name for f in fields(Dimension)]
        specific = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in shared}
        when = {path: sorted(values, key=repr) for path, values in sorted(self.conditions.items())}
        prior = {} if self.prior is None else {"prior": self.prior, "strength": self.strength}
        return {"type": type(self).__name__, **specific, "tier": self.tier, "when": when, **prior}
