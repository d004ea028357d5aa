"""The median rule with another share of the trials to keep than a half."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from hpo.search.strategies.median import AgainstComplete


class Percentile(AgainstComplete):
    """Stop a trial whose best loss so far is above a percentile of the complete trials' losses at the same epoch.

    percentile   of their losses, linear between two: at 25 the best quarter goes on

    The other options are those of the median rule. Decides as optuna.pruners.PercentilePruner does, its steps being
    epochs.
    """

    name: Literal["percentile"] = "percentile"
    percentile: float = Field(default=25.0, ge=0.0, le=100.0)

    def bound(self, losses: Sequence[float]) -> tuple[str, float]:
        ranked, place = sorted(losses), (len(losses) - 1) * (self.percentile / 100)
        below = math.floor(place)
        low, high, part = ranked[below], ranked[min(below + 1, len(ranked) - 1)], place - below
        value = low
        if low < high:  # from the nearer end, as numpy has it
            value = low + (high - low) * part if part < 0.5 else high - (high - low) * (1 - part)
        return f"{self.percentile:g}th percentile", value
