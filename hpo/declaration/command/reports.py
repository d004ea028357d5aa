"""What a running program says: JSON lines in a file, or lines of its output that patterns know."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import TrainerError
from trainer.quote import quoted

POSITIONS = ("epoch", "step")  # the patterns that say where a report stands
_KEYS = ("metrics", *POSITIONS, "checkpoint", "tags", "id")
_LONGEST = 1 << 20  # bytes of a line
_FORM = '{"epoch": 1, "metrics": {"val/loss": 0.5}}'
_NOT_IN_JSON = ("nan", "inf", "+inf", "-inf", "infinity", "+infinity", "-infinity")  # in a report as text, in any case
_ENDS = re.compile(rb"[\r\n]")


@dataclass(frozen=True)
class Said:
    """One report of a program."""

    metrics: Any
    epoch: int | None = None
    step: int | None = None
    checkpoint: Any = None
    tags: Any = None
    id: Any = None


@dataclass
class Lines:
    """The whole lines of a file that grows, each once."""

    path: Path
    _rest: bytes = b""
    _at: int = 0

    def new(self, *, ended: bool = False) -> Iterator[bytes]:
        """Lines that have been added, without their ends; with `ended` what follows the last one too."""
        with self.path.open("rb") as file:
            file.seek(self._at)
            while data := file.read(_LONGEST):
                self._at += len(data)
                *lines, rest = _ENDS.split(self._rest + data)
                self._rest = rest[-_LONGEST:]  # of a line that never ends
                yield from lines
        if ended and self._rest:
            rest, self._rest = self._rest, b""
            yield rest

    @property
    def half(self) -> bytes:
        """What follows the last whole line."""
        return self._rest


@dataclass
class Reports:
    """Reports as JSON lines in a file."""

    lines: Lines
    count: int = 0
    answered = True  # whether the program can be told to stop by an answer

    def new(self, *, ended: bool = False) -> Iterator[Said]:
        """Raises TrainerError, with the line, for one that is no report."""
        for line in self.lines.new():
            if line.strip():
                self.count += 1
                yield self._read(line)
        if ended and self.lines.half.strip():
            raise TrainerError(
                f"report {self.count + 1}, {quoted(self._text(self.lines.half))}, is half a line: end it by a newline."
            )

    def _read(self, line: bytes) -> Said:
        where = f"report {self.count}, {quoted(self._text(line))},"
        try:
            report = json.loads(line)
        except ValueError as error:
            raise TrainerError(f"{where} is no JSON: write lines such as {_FORM}.") from error
        if not isinstance(report, dict):
            raise TrainerError(f"{where} is no JSON object: write lines such as {_FORM}.")
        if unknown := [key for key in report if key not in _KEYS]:
            raise TrainerError(f"{where} has {unknown[0]!r}, which is none of {', '.join(_KEYS)}: write {_FORM}.")
        for key in POSITIONS:
            if not isinstance(value := report.get(key), int | None) or isinstance(value, bool):
                raise TrainerError(f"{where} has {key} {quoted(value)}: give a whole number from 1.")
        metrics: Any = report.get("metrics")
        if isinstance(metrics, dict):
            texts = {name: value for name, value in metrics.items() if isinstance(value, str)}
            metrics |= {name: float(value) for name, value in texts.items() if value.lower() in _NOT_IN_JSON}
        return Said(metrics, *(report.get(key) for key in ("epoch", "step", "checkpoint", "tags", "id")))

    @staticmethod
    def _text(line: bytes) -> str:
        return line.decode(errors="replace")


@dataclass
class Output:
    """Reports that patterns find in a program's output: one for each metric, and for epoch or step.

    A report is made once every metric has been found; it stands at the epoch or step that was found last, or, where no
    pattern knows that, at the next epoch.
    """

    lines: Lines
    patterns: Mapping[str, re.Pattern[str]]
    epoch: int  # the last one before the program began
    answered = False
    _found: dict[str, float] = field(default_factory=dict[str, float])

    def new(self, *, ended: bool = False) -> Iterator[Said]:
        """Raises TrainerError where a pattern has found what is no number."""
        for line in self.lines.new(ended=ended):
            text = line.decode(errors="replace")
            for name, pattern in self.patterns.items():
                if match := pattern.search(text):
                    self._found[name] = self._number(name, match[1], text)
            if all(name in self._found for name in self.patterns):
                yield self._report()

    def _report(self) -> Said:
        metrics = {name: value for name, value in self._found.items() if name not in POSITIONS}
        places: dict[str, Any] = {name: self._whole(name) for name in POSITIONS if name in self._found}
        self._found = {name: value for name, value in self._found.items() if name in POSITIONS}
        if not places:
            self.epoch += 1
            places = {"epoch": self.epoch}
        return Said(metrics, **places)

    def _whole(self, name: str) -> int:
        if not (value := self._found[name]).is_integer():
            raise TrainerError(f"output.{name} has found {value:g}, which is no whole number: narrow its group.")
        return int(value)

    @staticmethod
    def _number(name: str, text: str, line: str) -> float:
        try:
            return float(text.replace(",", ""))
        except ValueError as error:
            raise TrainerError(
                f"output.{name} has found {quoted(text)} in {quoted(line)}, which is no number: narrow its group."
            ) from error
