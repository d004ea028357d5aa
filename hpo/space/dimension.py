"""Defines the base of a search space's dimensions, which turn coordinates into values.

A dimension has a coordinate, which a sampler draws, and a value, which a configuration gets. They differ if the
coordinate has its own scale: the exponent of a power of two, the index of an option, a point of the unit interval for
values that depend on another dimension.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any, Self

from hpo.space.densities import densities
from hpo.space.values import is_number, plain
from hpo.text import near
from trainer.quote import quoted
from trainer.report import Json

# A sampler's view of a dimension: ("float", low, high, log, step), ("int", low, high, log, step), ("choice", n) for 0
# .. n-1, or ("unit",) for the interval [0, 1].
Coordinate = tuple[Any, ...]

_SPREAD = 0.1  # the standard deviation of draws around a prior, as a share of the range


class _ByDefault:
    """The prior of a dimension that names none."""

    def __repr__(self) -> str:
        return "BY_DEFAULT"


_BY_DEFAULT: Any = _ByDefault()


@dataclass(frozen=True)
class Dimension(ABC):
    """The base class of all dimensions.

    tier       1 matters most; `--tier N` searches the dimensions up to N and leaves the others as they are configured.
    when       {path: value or several values}: active only while every named dimension or field has one of them.
    prior      a value believed to be good, around which random draws gather; see `guided`. With `prior=None` a
               dimension takes no density by default either (hpo.declaration.default_densities).
    like       instead of a prior, the name of a density of good values that random draws follow, such as "lr/adam":
               one of `hpo.space.densities`, within the dimension's range.
    strength   the share of draws that follow the prior or the density, the others being uniform: above 0, at most 1.

    `relative`, which a Space sets if its rules need it, makes the coordinate a point of the unit interval, among the
    values that the rules leave for the dimension.
    """

    tier: int = field(default=1, kw_only=True)
    when: Mapping[str, Json | set[Any] | frozenset[Any]] | None = field(default=None, kw_only=True)
    prior: Any = field(default=_BY_DEFAULT, kw_only=True)
    like: str | None = field(default=None, kw_only=True)
    strength: float = field(default=0.5, kw_only=True)
    relative: bool = field(default=False, init=False, repr=False)
    undecided: bool = field(default=False, init=False, repr=False, compare=False)  # neither prior nor like was given

    def __post_init__(self) -> None:
        object.__setattr__(self, "undecided", self.prior is _BY_DEFAULT and self.like is None)
        object.__setattr__(self, "prior", None if self.prior is _BY_DEFAULT else self.prior)
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
        """Returns the number of values, ignoring the divisor; infinite without a step."""

    def faults(self) -> Iterator[str]:
        """Yields the mistakes of the declaration, in words that follow the dimension's name."""
        if not is_number(self.tier, int) or self.tier < 1:
            yield f"tier={quoted(self.tier)} must be a whole number from 1"
        yield from (f"when names no value for {path!r}" for path, values in self.conditions.items() if not values)
        if not is_number(self.strength, (int, float)) or not 0 < self.strength <= 1:
            yield f"strength={quoted(self.strength)} must be above 0 and at most 1"

    def prior_faults(self) -> Iterator[str]:
        """Yields the mistakes of prior and density, if `faults` yields none, in the same words."""
        if self.prior is not None and self.at(self.prior) is None:
            yield f"prior={self.prior!r} is not among its values"
        if self.like is None:
            return
        density, like = densities().get(str(self.like)), f"like={quoted(self.like)}"
        if density is None:
            yield f"{like} names no density: there are {', '.join(densities())}{near(str(self.like), densities())}"
        elif self.prior is not None:
            yield f"{like} and prior={quoted(self.prior)} cannot be combined; drop one"
        elif not self.scale:
            yield f"{like} is for numbers; drop it"
        elif self._shares[0] == self._shares[1]:
            low, high, _ = self.scale
            good = f"{density.quantiles[0]:g} to {density.quantiles[-1]:g}"
            yield f"{like} has good values from {good} and none from {low:g} to {high:g}; drop it or move the range"

    @property
    def scale(self) -> tuple[float, float, bool] | None:
        """Returns the ends of a range of numbers and whether it is logarithmic; None for anything else."""
        return None

    @cached_property
    def _shares(self) -> tuple[float, float]:  # of the density's good values, below the ends of the range
        assert self.like is not None and self.scale is not None
        low, high, _ = self.scale
        return densities()[self.like].share(low), densities()[self.like].share(high)

    @property
    def has_prior(self) -> bool:
        """Returns whether the dimension has a prior or a density."""
        return self.prior is not None or self.like is not None

    @property
    def centre(self) -> float:
        """Returns the point of [0, 1] around which draws gather: the prior's, or the density's median; else the
        middle."""
        if self.like is not None:
            return self._by_density(0.5)
        return 0.5 if self.prior is None else self.to_unit(self.at(self.prior))

    @abstractmethod
    def from_unit(self, u: float) -> Any:
        """Returns the coordinate at `u` in [0, 1]."""

    def guided(self, u: float) -> Any:
        """Returns the coordinate at `u` in [0, 1] of a mixture with the prior, as in Mallik et al. 2023 ("PriorBand").

        With probability `strength` it is the prior's option, or a normal draw around the prior, cut off at the ends,
        with a tenth of the (logarithmic) range as its standard deviation, or a draw of the density that `like` names;
        else it is uniform.
        """
        if not self.has_prior:
            return self.from_unit(u)
        if u >= self.strength:
            return self.from_unit((u - self.strength) / (1 - self.strength))
        if self.like is not None:
            return self.from_unit(self._by_density(u / self.strength))
        return self.from_unit(self._around(self.to_unit(self.at(self.prior)), u / self.strength))

    def _by_density(self, v: float) -> float:  # below which a share `v` of the density's good values in range lies
        assert self.like is not None and self.scale is not None
        (first, last), (low, high, log) = self._shares, self.scale
        value = min(max(densities()[self.like].value(first + v * (last - first)), low), high)
        low, high, value = (math.log(x) if log else x for x in (low, high, value))
        return 0.5 if low == high else (value - low) / (high - low)

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
        """Returns True if a sampler could draw the coordinate."""
        kind, *rest = self.coordinate
        if kind == "choice":
            return coordinate in range(rest[0])
        low, high, _, step = (0.0, 1.0, False, None) if kind == "unit" else rest
        return low <= coordinate <= high and (kind != "int" or (coordinate - low) % step == 0)

    def locate(self, coordinate: Any, value: Any, divisor: int = 1) -> Any:
        """Returns the coordinate of `value`, which was `coordinate` in an older form of the dimension; None if it has
        none."""
        return coordinate if self.holds(coordinate) and self.value(coordinate, divisor) == value else None

    @abstractmethod
    def at(self, value: Any, divisor: int = 1) -> Any:
        """Returns a coordinate of `value`, or None if the dimension lacks it."""

    @abstractmethod
    def extremes(self, divisor: int = 1) -> Sequence[Any]:
        """Returns values that represent all: the field accepts every value if it accepts these."""

    @abstractmethod
    def grid(self, points: int, divisor: int = 1) -> Sequence[Any]:
        """Returns the coordinates of a grid: every value if there is a step, else `points` evenly spread values."""

    def set_relative(self, relative: bool) -> Self:
        """Returns the same dimension with its coordinate made relative or not."""
        return self if self.relative == relative else self._changed(relative)

    def following(self, like: str) -> Self:
        """Returns the same dimension, whose draws follow the density of this name."""
        return self._changed(self.relative, like=like)

    def _changed(self, relative: bool, **changes: Any) -> Self:
        made = replace(self, **changes)
        object.__setattr__(made, "relative", relative)
        object.__setattr__(made, "undecided", self.undecided and made.like is None)
        return made

    @property
    def span(self) -> str:
        """Returns a text that describes the possible values."""
        return ""

    @abstractmethod
    def may_be(self, value: Any) -> bool:
        """Returns True if the dimension can take `value`, which a condition names."""

    def describe(self) -> dict[str, Any]:
        """Returns the declaration as JSON values."""
        shared = [f.name for f in fields(Dimension)]
        specific = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in shared}
        when = {path: sorted(values, key=repr) for path, values in sorted(self.conditions.items())}
        options = {"prior": self.prior, "like": self.like, "strength": self.strength} if self.has_prior else {}
        prior = {name: value for name, value in options.items() if value is not None}
        return {"type": type(self).__name__, **specific, "tier": self.tier, "when": when, **prior}
