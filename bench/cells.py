"""Keeps the figures of cells that have ended, in a file of JSON lines, so that a bench that was stopped goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path


class Cells:
    """Maps a cell's key to its figures."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, list[float]] = {}
        for line in path.read_text().splitlines() if path is not None and path.exists() else []:
            self._known |= json.loads(line)

    def get(self, key: str, compute: Callable[[], list[float]]) -> list[float]:
        """Returns the figures of a cell, computing and keeping them if they are not known."""
        if key not in self._known:
            self._known[key] = compute()
            if self._path is not None:
                with self._path.open("a") as lines:
                    lines.write(json.dumps({key: self._known[key]}) + "\n")
        return self._known[key]
