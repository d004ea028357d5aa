"""Reads the reports that a running program writes as JSON lines into a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import TrainerError
from trainer.quote import quoted

POSITIONS = ("epoch", "step")  # the patterns that locate a report
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
    """Yields the whole lines of a growing file, each once."""

    path: Path
    _rest: bytes = b""
    _at: int = 0

    def new(self, *, ended: bool = False) -> Iterator[bytes]:
        """Yields the lines added since the last call, without their ends; with `ended` also what follows the last
        one."""
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
        """Returns what follows the last whole line."""
        return self._rest


@dataclass
class Reports:
    """Reads reports as JSON lines from a file."""

    lines: Lines
    count: int = 0
    answered = True  # whether an answer can tell the program to stop

    def new(self, code: int | None = None) -> Iterator[Said]:
        """Yields the reports since the last call; `code` is the program's exit code once it has ended.

        Raises TrainerError, with the line, for one that is not a report.
        """
        for line in self.lines.new():
            if line.strip():
                self.count += 1
                yield self._read(line)
        if code == 0 and self.lines.half.strip():
            raise TrainerError(
                f"report {self.count + 1}, {quoted(self._text(self.lines.half))}, is half a line: end it by a newline."
            )

    def _read(self, line: bytes) -> Said:
        where = f"report {self.count}, {quoted(self._text(line))},"
        try:
            report = json.loads(line)
        except ValueError as error:
            raise TrainerError(f"{where} is not JSON: write lines such as {_FORM}.") from error
        if not isinstance(report, dict):
            raise TrainerError(f"{where} is not a JSON object: write lines such as {_FORM}.")
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
