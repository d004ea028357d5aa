"""The dimensions of a search space: Float, Int, Choice, Bool.

A dimension has a coordinate, which a sampler draws, and a value, which a configuration gets. They differ where the
coordinate has a scale of its own: the exponent of a power of two, the index of an option, a point of the unit
interval for values that depend on another dimension.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from functools import cached_property
from statistics import NormalDist
from typing import Any

from hpo.space.values import LARGEST, among, cell, identity, is_number, log_integer, log_place, plain, same
from trainer.quote import quoted, shortened
from trainer.report import Json

# What a sampler sees of a dimension: ("float", low, high, log, step), ("int", low, high, log, step),
# ("choice", n) for 0 .. n-1, or ("unit",) for the interval [0, 1].
Coordinate = tuple[Any, ...]

_SPREAD = 0.1  # the standard deviation of draws around a prior, as a share of the range


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


@dataclass(frozen=True)
class Dimension(ABC):
    """What all dimensions share.

    tier       1 matters most; `--tier N` searches the dimensions up to N and leaves the others as they are configured.
    when       {path: value or several values}: active only while every named dimension or field has one of them.
    prior      the value that is believed to be good, around which random draws gather; see `guided`.
    strength   the share of draws that follow the prior, the others being uniform: above 0, at most 1.
    """

    tier: int = field(default=1, kw_only=True)
    when: Mapping[str, Json | set[Any] | frozenset[Any]] | None = field(default=None, kw_only=True)
    prior: Any = field(default=None, kw_only=True)
    strength: float = field(default=0.5, kw_only=True)

    def __post_init__(self) -> None:
        for one in fields(self):
            object.__setattr__(self, one.name, plain(getattr(self, one.name)))

    @cached_property
    def conditions(self) -> dict[str, tuple[Any, ...]]:
        return {
            path: tuple(values) if isinstance(values, set | frozenset | tuple | list) else (values,)
            for path, values in (self.when or {}).items()
        }

    @property
    def divisor(self) -> str | None:
        """The path of what every value must be a multiple of."""
        return None

    @property
    @abstractmethod
    def coordinate(self) -> Coordinate: ...

    @property
    @abstractmethod
    def count(self) -> float:
        """How many values there are, divisors apart; infinite without a step."""

    def faults(self) -> Iterator[str]:
        """What is wrong with the declaration itself, in words that follow the dimension's name."""
        if not is_number(self.tier, int) or self.tier < 1:
            yield f"tier={quoted(self.tier)} must be a whole number from 1"
        yield from (f"when names no value for {path!r}" for path, values in self.conditions.items() if not values)
        if not is_number(self.strength, (int, float)) or not 0 < self.strength <= 1:
            yield f"strength={quoted(self.strength)} must be above 0 and at most 1"

    @abstractmethod
    def from_unit(self, u: float) -> Any:
        """The coordinate at `u` in [0, 1]."""

    def guided(self, u: float) -> Any:
        """The coordinate at `u` in [0, 1] where the prior counts: a mixture, as in Mallik et al. 2023 ("PriorBand").

        With probability `strength` the prior's option, or a normal draw around the prior, its standard deviation a
        tenth of the (logarithmic) range, cut off at the ends; else uniform.
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
        """A point of [0, 1] that `from_unit` takes to the coordinate: the middle of those that it does."""

    @abstractmethod
    def value(self, coordinate: Any, divisor: int = 1) -> Any:
        """The parameter at a coordinate."""

    def holds(self, coordinate: Any) -> bool:
        """Whether a sampler could draw it."""
        kind, *rest = self.coordinate
        if kind == "choice":
            return coordinate in range(rest[0])
        low, high, _, step = (0.0, 1.0, False, None) if kind == "unit" else rest
        return low <= coordinate <= high and (kind != "int" or (coordinate - low) % step == 0)

    def locate(self, coordinate: Any, value: Any, divisor: int = 1) -> Any:
        """The coordinate of `value`, which an older form of the dimension had at `coordinate`; None if it has none."""
        return coordinate if self.holds(coordinate) and self.value(coordinate, divisor) == value else None

    @abstractmethod
    def at(self, value: Any, divisor: int = 1) -> Any:
        """A coordinate of `value`; None where the dimension does not hold it."""

    @abstractmethod
    def extremes(self, divisor: int = 1) -> Sequence[Any]:
        """Values that the field must accept for all to be acceptable."""

    @abstractmethod
    def grid(self, points: int, divisor: int = 1) -> Sequence[Any]:
        """Coordinates of a grid: every value where there is a step, else `points` evenly spread ones."""

    @abstractmethod
    def may_be(self, value: Any) -> bool:
        """Whether the dimension can take `value`; asked of what a condition names."""

    def describe(self) -> dict[str, Any]:
        """The declaration as JSON values."""
        shared = [f.name for f in fields(Dimension)]
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in shared}
        when = {path: sorted(values, key=repr) for path, values in sorted(self.conditions.items())}
        prior = {} if self.prior is None else {"prior": self.prior, "strength": self.strength}
        return {"type": type(self).__name__, **own, "tier": self.tier, "when": when, **prior}


@dataclass(frozen=True)
class Float(Dimension):
    """Real numbers in [low, high]; `log` for scale-free ones, `step` for low, low + step, ..., high."""

    low: float
    high: float
    log: bool = field(default=False, kw_only=True)
    step: float | None = field(default=None, kw_only=True)

    @property
    def coordinate(self) -> Coordinate:
        return "float", float(self.low), float(self.high), self.log, self.step

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        for name in ("low", "high") if self.step is None else ("low", "high", "step"):
            if not is_number(getattr(self, name), (int, float)):
                yield f"{name}={quoted(getattr(self, name))} must be a finite number"
                return
        if self.low > self.high:
            yield f"low={self.low} is above high={self.high}; swap them"
        elif not math.isfinite(float(self.high) - float(self.low)):
            yield f"low={self.low} and high={self.high} are further apart than a float can be; narrow the range"
        if self.log and self.low <= 0:
            yield f"log needs low above 0, not {self.low}"
        if self.step is not None:
            if self.log:
                yield "log and step cannot be combined; drop one"
            elif self.step <= 0:
                yield f"step={self.step} must be above 0"
            elif self._steps != int(self._steps):
                yield f"step={self.step} does not lead from low={self.low} to high={self.high}"

    @property
    def count(self) -> float:
        return 1 if self.low == self.high else math.inf if self.step is None else int(self._steps) + 1

    @cached_property
    def _steps(self) -> Decimal:
        return (Decimal(repr(self.high)) - Decimal(repr(self.low))) / Decimal(repr(self.step))

    def _at(self, k: int) -> float:
        """low + k step in decimal, so that 0.1 + 2 * 0.1 is 0.3."""
        return float(Decimal(repr(self.low)) + k * Decimal(repr(self.step)))

    def from_unit(self, u: float) -> float:
        if self.step is not None:
            return self._at(cell(u, int(self._steps) + 1))
        if self.log:
            lower, upper = math.log(self.low), math.log(self.high)
            return min(max(math.exp(lower + u * (upper - lower)), float(self.low)), float(self.high))
        return min(self.low + u * (self.high - self.low), float(self.high))

    def to_unit(self, coordinate: float) -> float:
        if self.step is not None:
            return (round((coordinate - self.low) / self.step) + 0.5) / (int(self._steps) + 1)
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, coordinate))
        return 0.5 if low == high else min(max((at - low) / (high - low), 0.0), 1.0)

    def value(self, coordinate: Any, divisor: int = 1) -> float:
        return float(coordinate) if self.step is None else self._at(round((coordinate - self.low) / self.step))

    def at(self, value: Any, divisor: int = 1) -> float | None:
        value = plain(value)
        found = self.value(float(value)) if self.may_be(value) else None
        return found if found == value else None

    def extremes(self, divisor: int = 1) -> Sequence[float]:
        return float(self.low), float(self.high)

    def grid(self, points: int, divisor: int = 1) -> Sequence[float]:
        if self.step is not None:
            return [self._at(k) for k in range(int(self._steps) + 1)]
        if self.low == self.high or points == 1:
            return [self.from_unit(0.5)]
        return [self.from_unit(k / (points - 1)) for k in range(points)]

    def may_be(self, value: Any) -> bool:
        return is_number(value, (int, float)) and self.low <= value <= self.high


@dataclass(frozen=True)
class Int(Dimension):
    """Whole numbers in [low, high] by `step`, or powers of two, or multiples of another dimension or field.

    `multiple_of` is the dotted path of a whole number; with `powers_of_two` the powers it divides remain.
    """

    low: int
    high: int
    log: bool = field(default=False, kw_only=True)
    step: int = field(default=1, kw_only=True)
    powers_of_two: bool = field(default=False, kw_only=True)
    multiple_of: str | None = field(default=None, kw_only=True)

    @property
    def divisor(self) -> str | None:
        return self.multiple_of

    @property
    def count(self) -> float:
        return len(self.allowed())

    @property
    def coordinate(self) -> Coordinate:
        if self.multiple_of is not None:
            return ("unit",)
        if self.powers_of_two:
            return "int", self.low.bit_length() - 1, self.high.bit_length() - 1, False, 1
        return "int", self.low, self.high, self.log, self.step

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        for name in ("low", "high", "step"):
            if not is_number(getattr(self, name), int):
                yield f"{name}={quoted(getattr(self, name))} must be a whole number"
                return
        for name in ("low", "high"):
            if abs(value := getattr(self, name)) > LARGEST:
                yield f"{name}={quoted(value)} must be from -2**53 to 2**53, where floats have every whole number"
                return
        if self.low > self.high:
            yield f"low={self.low} is above high={self.high}; swap them"
        if (self.log or self.multiple_of is not None) and self.low < 1:
            yield f"{'log' if self.log else 'multiple_of'} needs low of at least 1, not {self.low}"
        if self.step < 1:
            yield f"step={self.step} must be at least 1"
        elif (self.high - self.low) % self.step:
            yield f"step={self.step} does not lead from low={self.low} to high={self.high}"
        if self.step != 1 and (self.log or self.powers_of_two or self.multiple_of is not None):
            yield "step cannot be combined with log, powers_of_two or multiple_of; drop one"
        if self.powers_of_two:
            if self.log:
                yield "powers_of_two is logarithmic already; drop log"
            for name in ("low", "high"):
                if (value := getattr(self, name)) < 1 or value & (value - 1):
                    yield f"{name}={value} is not a power of two"

    def allowed(self, divisor: int = 1) -> Sequence[int]:
        """All values that `divisor` divides, ascending."""
        if self.powers_of_two:
            exponents = range(self.low.bit_length() - 1, self.high.bit_length())
            return [1 << exponent for exponent in exponents if not (1 << exponent) % divisor]
        if self.multiple_of is not None:
            return range(-(-self.low // divisor) * divisor, self.high + 1, divisor)
        return range(self.low, self.high + 1, self.step)

    def from_unit(self, u: float) -> Any:
        if self.multiple_of is not None:
            return u
        if self.log:
            return log_integer(u, self.low, self.high)
        index = cell(u, len(self.allowed()))
        return self.coordinate[1] + index * self.coordinate[4]

    def to_unit(self, coordinate: Any) -> float:
        if self.multiple_of is not None:
            return float(coordinate)
        if self.log:
            return log_place(coordinate, self.low, self.high)
        return ((coordinate - self.coordinate[1]) // self.coordinate[4] + 0.5) / len(self.allowed())

    def value(self, coordinate: Any, divisor: int = 1) -> int:
        if self.multiple_of is None:
            return 1 << int(coordinate) if self.powers_of_two else int(coordinate)
        allowed = self.allowed(divisor)
        if self.log:  # over the factors, so that the multiples are log-uniform
            return divisor * log_integer(coordinate, allowed[0] // divisor, allowed[-1] // divisor)
        return allowed[cell(coordinate, len(allowed))]

    def at(self, value: Any, divisor: int = 1) -> Any:
        value = plain(value)
        if not self.may_be(value) or value % divisor:
            return None
        allowed = self.allowed(divisor)
        if self.multiple_of is None:
            return value.bit_length() - 1 if self.powers_of_two else value
        if self.log:
            return log_place(value // divisor, allowed[0] // divisor, allowed[-1] // divisor)
        return (allowed.index(value) + 0.5) / len(allowed)

    def extremes(self, divisor: int = 1) -> Sequence[int]:
        allowed = self.allowed(divisor)
        return allowed if self.powers_of_two else (allowed[0], allowed[-1])

    def grid(self, points: int, divisor: int = 1) -> Sequence[Any]:
        count = len(self.allowed(divisor))
        if count > points and self.step == 1 and not self.powers_of_two:
            units = [k / max(points - 1, 1) for k in range(points)]
        elif self.log:
            return [self.at(value, divisor) for value in self.allowed(divisor)]
        else:
            units = [(k + 0.5) / count for k in range(count)]
        first_of = {self.value(self.from_unit(u), divisor): self.from_unit(u) for u in reversed(units)}
        return [first_of[value] for value in sorted(first_of)]

    def may_be(self, value: Any) -> bool:
        return is_number(value, int) and self.low <= value <= self.high and value in self.allowed()


@dataclass(frozen=True)
class Choice(Dimension):
    """One of several JSON values, in no order."""

    options: Sequence[Any]

    @property
    def coordinate(self) -> Coordinate:
        return "choice", len(self.options)

    @property
    def count(self) -> float:
        return len(self.options)

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if not _is_list(self.options):
            yield f"options={quoted(self.options)} must be a list of values"
            return
        if not self.options:
            yield "options are empty; name at least one"
        try:
            texts = [identity(option) for option in self.options]
        except (TypeError, ValueError):
            yield "options must be JSON values, their numbers finite"
            return
        if repeated := [text for text in texts if texts.count(text) > 1]:
            yield f"option {shortened(repeated[0])} stands twice"

    def from_unit(self, u: float) -> int:
        return cell(u, len(self.options))

    def to_unit(self, coordinate: int) -> float:
        return (coordinate + 0.5) / len(self.options)

    def value(self, coordinate: Any, divisor: int = 1) -> Any:
        return self.options[int(coordinate)]

    def locate(self, coordinate: Any, value: Any, divisor: int = 1) -> int | None:
        return self.at(value)

    def at(self, value: Any, divisor: int = 1) -> int | None:
        value = plain(value)
        return next((index for index, option in enumerate(self.options) if same(option, value)), None)

    def _around(self, centre: float, v: float) -> float:
        return centre

    def extremes(self, divisor: int = 1) -> Sequence[Any]:
        return self.options

    def grid(self, points: int, divisor: int = 1) -> Sequence[int]:
        return range(len(self.options))

    def may_be(self, value: Any) -> bool:
        return among(value, self.options)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"options": json.loads(json.dumps(list(self.options)))}


@dataclass(frozen=True)
class Bool(Choice):
    """False or true."""

    options: Sequence[Any] = field(default=(False, True), init=False)
