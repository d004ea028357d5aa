"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.redaction import redacted

Level = Literal["ok", "note", "fails"]


@dataclass(frozen=True)
class Finding:
    """One fact: `area` groups it, `level` is ok, note for what may surprise, or fails for what would; `fix` says what
    to do about it. Texts hold no password."""

    area: str
    level: Level
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        for name in ("text", "fix"):
            object.__setattr__(self, name, redacted(getattr(self, name)))

    def describe(self) -> str:
        """A line, or two with the fix."""
        mark = {"ok": "     ", "note": "note ", "fails": "FAILS"}[self.level]
        return f"  {mark} {self.text}" + (f"\n        -> {self.fix}" if self.fix not in self.text else "")
