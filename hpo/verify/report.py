"""Collects what `hpo verify` finds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Report:
    """`counts` of what was looked at; `differences`, one sentence each; `behind` as `mirror_process.behind` counts."""

    counts: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    behind: int = 0
