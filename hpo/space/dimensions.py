"""Defines the dimensions of a search space: Float, Int, Choice, Bool."""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property, wraps
from typing import Any

from hpo.errors import SpaceError
from hpo.space.dimension import Coordinate, Dimension
from hpo.space.values import LARGEST, among, cell, identity, is_number, log_integer, log_place, plain, same
from trainer.quote import quoted, shortened


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


@dataclass(frozen=True)
class Float(Dimension):
    """Real numbers in [low, high]; `log` for scale-free ones, `step` for low, low + step, ..., high."""

    low: float
    high: float
    log: bool = field(default=False, kw_only=True)
    step: float | None = field(default=None, kw_only=True)

    @property
    def coordinate(self) -> Coordinate:
        return ("unit",) if self.relative else ("float", float(self.low), float(self.high), self.log, self.step)

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
    def scale(self) -> tuple[float, float, bool]:
        return float(self.low), float(self.high), self.log

    @property
    def count(self) -> float:
        return 1 if self.low == self.high else math.inf if self.step is None else int(self._steps) + 1

    @cached_property
    def _steps(self) -> Decimal:
        return (Decimal(repr(self.high)) - Decimal(repr(self.low))) / Decimal(repr(self.step))

    def _at(self, k: int) -> float:
        """Returns low + k step, computed in decimal so that 0.1 + 2 * 0.1 is 0.3."""
        return float(Decimal(repr(self.low)) + k * Decimal(repr(self.step)))

    def between(self, low: float, high: float) -> Float | None:
        """Returns the part of the range within [low, high], by the same steps; None if it is empty."""
        slack = 1e-12 * max(abs(self.low), abs(self.high))  # rounding may put a value beyond an end
        low = max(low, float(self.low)) if not self.high < low <= self.high + slack else float(self.high)
        high = min(high, float(self.high)) if not self.low - slack <= high < self.low else float(self.low)
        if self.step is not None:
            first = math.ceil((low - self.low) / self.step - 1e-9)
            last = math.floor((high - self.low) / self.step + 1e-9)
            low, high = self._at(first), self._at(last)
        return self._changed(self.relative, low=low, high=high, prior=None, like=None) if low <= high else None

    def from_unit(self, u: float) -> float:
        return u if self.relative else self._placed(u)

    def _placed(self, u: float) -> float:  # the value at `u` in [0, 1]
        if self.step is not None:
            return self._at(cell(u, int(self._steps) + 1))
        if self.log:
            lower, upper = math.log(self.low), math.log(self.high)
            return min(max(math.exp(lower + u * (upper - lower)), float(self.low)), float(self.high))
        return min(self.low + u * (self.high - self.low), float(self.high))

    def to_unit(self, coordinate: float) -> float:
        return float(coordinate) if self.relative else self._unit(coordinate)

    def _unit(self, coordinate: float) -> float:  # the middle of the points that `_placed` maps to a value
        if self.step is not None:
            return (round((coordinate - self.low) / self.step) + 0.5) / (int(self._steps) + 1)
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, coordinate))
        return 0.5 if low == high else min(max((at - low) / (high - low), 0.0), 1.0)

    def value(self, coordinate: Any, divisor: int = 1) -> float:
        if self.relative:
            return self._rounded(self._placed(coordinate))
        return float(coordinate) if self.step is None else self._at(round((coordinate - self.low) / self.step))

    def _rounded(self, value: float) -> float:
        """Rounds to 12 digits, within the range, so that a value of 12 digits has a coordinate that decodes to it."""
        return min(max(float(f"{value:.12g}"), float(self.low)), float(self.high)) if self.step is None else value

    def at(self, value: Any, divisor: int = 1) -> float | None:
        value = plain(value)
        if not self.may_be(value):
            return None
        coordinate = self._unit(float(value)) if self.relative else float(value)
        decoded = self.value(coordinate)
        alike = math.isclose(decoded, value, rel_tol=1e-11) if self.relative else decoded == value
        return (coordinate if self.relative else decoded) if alike else None

    def extremes(self, divisor: int = 1) -> Sequence[float]:
        return float(self.low), float(self.high)

    def grid(self, points: int, divisor: int = 1) -> Sequence[float]:
        if self.step is not None:
            values = [self._at(k) for k in range(int(self._steps) + 1)]
            return [self._unit(value) for value in values] if self.relative else values
        if self.low == self.high or points == 1:
            return [self.from_unit(0.5)]
        return [self.from_unit(k / (points - 1)) for k in range(points)]

    @property
    def span(self) -> str:
        return f"{self.low} to {self.high}{'' if self.step is None else f' in steps of {self.step}'}"

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
    def scale(self) -> tuple[float, float, bool]:
        return float(self.low), float(self.high), self.log or self.powers_of_two

    @property
    def count(self) -> float:
        return len(self.allowed())

    @property
    def _in_unit(self) -> bool:  # whether the coordinate is a point of the unit interval
        return self.relative or self.multiple_of is not None

    @property
    def coordinate(self) -> Coordinate:
        if self._in_unit:
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
        """Returns all values that `divisor` divides, ascending."""
        if self.powers_of_two:
            exponents = range(self.low.bit_length() - 1, self.high.bit_length())
            return [1 << exponent for exponent in exponents if not (1 << exponent) % divisor]
        if self.multiple_of is not None:
            return range(-(-self.low // divisor) * divisor, self.high + 1, divisor)
        return range(self.low, self.high + 1, self.step)

    def between(self, low: float, high: float) -> Int | None:
        """Returns the part of the range within [low, high], by the same steps; None if it is empty."""
        allowed = self.allowed()
        first, last = bisect_left(allowed, low - 1e-9 * abs(low)), bisect_right(allowed, high + 1e-9 * abs(high))
        part = allowed[first:last]
        return self._changed(self.relative, low=part[0], high=part[-1], prior=None, like=None) if part else None

    def from_unit(self, u: float) -> Any:
        if self._in_unit:
            return u
        if self.log:
            return log_integer(u, self.low, self.high)
        index = cell(u, len(self.allowed()))
        return self.coordinate[1] + index * self.coordinate[4]

    def to_unit(self, coordinate: Any) -> float:
        if self._in_unit:
            return float(coordinate)
        if self.log:
            return log_place(coordinate, self.low, self.high)
        return ((coordinate - self.coordinate[1]) // self.coordinate[4] + 0.5) / len(self.allowed())

    def value(self, coordinate: Any, divisor: int = 1) -> int:
        if not self._in_unit:
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
        if not self._in_unit:
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

    @property
    def span(self) -> str:
        step = f" in steps of {self.step}" if self.step != 1 else ""
        step += ", powers of two" if self.powers_of_two else ""
        step += f", multiples of {self.multiple_of}" if self.multiple_of else ""
        return f"{self.low} to {self.high}{step}"

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

    @property
    def span(self) -> str:
        return ", ".join(map(repr, self.options))

    def may_be(self, value: Any) -> bool:
        return among(value, self.options)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"options": json.loads(json.dumps(list(self.options)))}


def _taking_one_list(made: Callable[..., None]) -> Callable[..., None]:
    """Wraps the constructor of a Choice to report options that are not given as one list."""

    @wraps(made)
    def init(self: Choice, *options: Any, **declared: Any) -> None:
        if len(options) > 1:
            shown = ", ".join(map(repr, options))
            raise SpaceError(f"Choice({shown}): give the options as one list, Choice([{shown}]).")
        made(self, *options, **declared)

    return init


Choice.__init__ = _taking_one_list(Choice.__init__)


@dataclass(frozen=True)
class Bool(Choice):
    """A choice between False and True."""

    options: Sequence[Any] = field(default=(False, True), init=False)
