"""Generalises the median rule to other percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from hpo.search.strategies.median import AgainstComplete


class Percentile(AgainstComplete):
    """Stops a trial whose best loss so far is above a percentile of the complete trials' losses at the same epoch.

    percentile   of their losses, linearly interpolated: at 25 the best quarter continues

    The other options are those of the median rule. Decides like optuna.pruners.PercentilePruner, with epochs as its
    steps.
    """

    name: Literal["percentile"] = "percentile"
    percentile: float = Field(default=25.0, ge=0.0, le=100.0)

    def bound(self, losses: Sequence[float]) -> tuple[str, float]:
        ranked, position = sorted(losses), (len(losses) - 1) * (self.percentile / 100)
        below = math.floor(position)
        low, high, part = ranked[below], ranked[min(below + 1, len(ranked) - 1)], position - below
        value = low
        if low < high:  # interpolates from the nearer end, as numpy does
            value = low + (high - low) * part if part < 0.5 else high - (high - low) * (1 - part)
        return f"{self.percentile:g}th percentile", value
