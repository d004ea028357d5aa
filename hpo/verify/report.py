"""Collects the differences that `hpo verify` finds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hpo import text


@dataclass
class Report:
    """The result of a verification.

    counts       how many objects of each kind were checked
    differences  one sentence each
    behind       as counted by `mirror_process.behind`
    """

    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    behind: int = 0

    def describe(self) -> str:
        """Returns the counts in a line, then the differences, a line each."""
        checked = text.tally(self.counts) or "no study"
        lines = [f"{text.counted(len(self.differences), 'difference')}; checked {checked}"]
        if self.behind:
            behind = text.counted(self.behind, "transaction")
            lines.append(f"  MLflow is behind by {behind}: `{text.command('sync')}` sends what is missing.")
        return "\n".join([*lines, *(f"  differs: {difference}" for difference in self.differences)])
