"""Collects what `hpo verify` finds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hpo import text


@dataclass
class Report:
    """`counts` of what was looked at; `differences`, one sentence each; `behind` as `mirror_process.behind` counts."""

    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    behind: int = 0

    def describe(self) -> str:
        """The differences, a line each, below what was looked at."""
        looked_at = text.tally(self.counts) or "no study"
        lines = [f"{text.counted(len(self.differences), 'difference')}; looked at {looked_at}"]
        if self.behind:
            behind = text.counted(self.behind, "transaction")
            lines.append(f"  MLflow is behind by {behind}: `{text.command('sync')}` sends what is missing.")
        return "\n".join([*lines, *(f"  differs: {difference}" for difference in self.differences)])
