"""Reads reports from a program's output by patterns: one for each metric, and for the epoch or step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import regex

from hpo.declaration.command.reports import POSITIONS, Lines, Said
from trainer.errors import TrainerError
from trainer.quote import quoted

Several = Literal["last", "mean"]
SILENCE = 5.0  # seconds without output after which a step is complete
LONGEST_SEARCH = 1.0  # seconds of processor time for one pattern on one line


@dataclass
class Output:
    """Makes one report of each step that a program prints.

    A value belongs to the epoch or step on its line, else to the one printed last. A metric whose first value comes
    before any epoch or step is printed ahead: its values belong to the next one. A step is complete once the next one
    is printed, the output is silent for `silence` seconds or the program ends. Of several values of a metric the last
    counts, or their mean. Output for a step after its report is ignored. A metric that a step lacks is taken from
    earlier ones that made no report. Without a pattern for epoch or step, each whole set of metrics is the next epoch.
    """

    lines: Lines
    patterns: Mapping[str, regex.Pattern[str]]
    several: Several = "last"
    silence: float = SILENCE
    answered = False
    _at: int | None = None  # the epoch or step that was printed last
    _reported: int | None = None
    _offset: int = 0  # 1 for a program that counts from 0
    _values: dict[str, list[float]] = field(default_factory=dict[str, list[float]])  # of `_at`
    _next: dict[str, list[float]] = field(default_factory=dict[str, list[float]])  # of the place that is printed next
    _ahead: set[str] = field(default_factory=set[str])  # metrics that are printed ahead
    _earlier: dict[str, float] = field(default_factory=dict[str, float])
    _heard_at: float = field(default_factory=time.monotonic)

    def new(self, code: int | None = None) -> Iterator[Said]:
        """Yields the reports since the last call; `code` is the program's exit code once it has ended.

        Raises TrainerError if a pattern takes too long or finds anything but a number.
        """
        for line in self.lines.new(ended=code == 0):
            self._heard_at = time.monotonic()
            yield from self._hear(line.decode(errors="replace"))
        if code is not None or time.monotonic() > self._heard_at + self.silence:
            yield from self._report()

    @property
    def _position(self) -> str | None:
        return next((name for name in POSITIONS if name in self.patterns), None)

    def _hear(self, text: str) -> Iterator[Said]:
        numbers = {name: number for name in self.patterns if (number := self._number(name, text)) is not None}
        if self._position is None:
            _add(self._values, numbers)
            if self._whole():
                self._at = (self._reported or 0) + 1
                yield from self._report()
        elif (number := numbers.pop(self._position, None)) is not None:
            yield from self._move(self._count(number))
            for name in self._ahead & numbers.keys():
                self._ahead.remove(name)
                self._values.pop(name, None)
            _add(self._values, numbers)
        else:
            self._ahead |= numbers.keys() if self._at is None else set()
            for name, value in numbers.items():
                _add(self._next if name in self._ahead else self._values, {name: value})

    def _count(self, number: float) -> int:
        """Returns the epoch or step counted from 1."""
        if not number.is_integer():
            raise TrainerError(f"output.{self._position} has found {number:g}, not a whole number: narrow its group.")
        if self._at is None:
            self._offset = int(number == 0)
        return int(number) + self._offset

    def _move(self, at: int) -> Iterator[Said]:
        """Completes the step before another one."""
        if at != self._at:
            yield from self._report()
            self._earlier |= self._counted() if self._at != self._reported else {}
            self._at, self._values = at, {}
        for name, values in self._next.items():
            self._values.setdefault(name, []).extend(values)
        self._next = {}

    def _whole(self) -> bool:
        return all(name in self._values or name in self._earlier for name in self.patterns if name not in POSITIONS)

    def _counted(self) -> dict[str, float]:
        """Returns one value for each metric that the step has printed."""
        if self.several == "mean":
            return {name: sum(values) / len(values) for name, values in self._values.items()}
        return {name: values[-1] for name, values in self._values.items()}

    def _report(self) -> Iterator[Said]:
        """Yields the report of the current epoch or step, once."""
        if self._at is None or self._at == self._reported or not self._values or not self._whole():
            return
        metrics = self._earlier | self._counted()
        self._values, self._earlier, self._reported = {}, {}, self._at
        yield Said(metrics, **{self._position or "epoch": self._at})

    def _number(self, name: str, line: str) -> float | None:
        """Returns the number that a pattern finds in a line. Raises TrainerError."""
        pattern = self.patterns[name]
        try:
            match = pattern.search(line, timeout=LONGEST_SEARCH, concurrent=True)
        except TimeoutError as error:
            raise TrainerError(
                f"output.{name}={pattern.pattern!r} needs more than {LONGEST_SEARCH:g} s for {quoted(line)}: write it "
                "without repeats inside of repeats."
            ) from error
        if match is None:
            return None
        try:
            return float(match[1].replace(",", ""))
        except ValueError as error:
            raise TrainerError(
                f"output.{name} has found {quoted(match[1])} in {quoted(line)}, not a number: narrow its group."
            ) from error


def _add(to: dict[str, list[float]], numbers: Mapping[str, float]) -> None:
    for name, number in numbers.items():
        to.setdefault(name, []).append(number)
