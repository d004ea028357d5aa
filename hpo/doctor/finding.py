"""Holds the result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.redaction import redacted

Level = Literal["ok", "note", "fails"]


@dataclass(frozen=True)
class Finding:
    """A fact that a check has established.

    area   the group it belongs to
    level  ok, note for what may surprise, or fails for what would fail
    fix    the remedy, if there is one

    Texts contain no passwords.
    """

    area: str
    level: Level
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        for name in ("text", "fix"):
            object.__setattr__(self, name, redacted(getattr(self, name)))

    def describe(self) -> str:
        """Returns one line, or two with the fix."""
        mark = {"ok": "     ", "note": "note ", "fails": "FAILS"}[self.level]
        return f"  {mark} {self.text}" + (f"\n        -> {self.fix}" if self.fix not in self.text else "")
