"""Reads the densities of good values, which a dimension's `like` names.

`densities.json` has, for each name, the quantiles of the values in the best configurations of public benchmarks, with
the source and its licence; `bench/densities.py` computes it.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Density:
    """The distribution of a hyperparameter's good values.

    quantiles  ascending values at evenly spread shares from 0 to 1; between two of them the density is uniform, in the
               logarithm of the value if `log`
    source     the public data that they are computed from
    """

    log: bool
    quantiles: tuple[float, ...]
    source: str

    def share(self, value: float) -> float:
        """Returns the share of good values that lie below `value`."""
        last = len(self.quantiles) - 1
        if value <= self.quantiles[0]:
            return 0.0
        if value >= self.quantiles[last]:
            return 1.0
        k = bisect_right(self.quantiles, value) - 1
        low, high = self._scaled(self.quantiles[k]), self._scaled(self.quantiles[k + 1])
        return (k + (self._scaled(value) - low) / (high - low)) / last

    def value(self, share: float) -> float:
        """Returns the value below which a share of the good ones lies."""
        position = share * (len(self.quantiles) - 1)
        k = min(int(position), len(self.quantiles) - 2)
        low, high = self._scaled(self.quantiles[k]), self._scaled(self.quantiles[k + 1])
        scaled = low + (position - k) * (high - low)
        return math.exp(scaled) if self.log else scaled

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.log else value


@cache
def densities() -> Mapping[str, Density]:
    """Returns all densities by name."""
    rows = json.loads(Path(__file__).with_name("densities.json").read_text(encoding="utf-8"))
    return {
        entry["name"]: Density(entry["log"], tuple(entry["quantiles"]), entry["source"]) for entry in rows["densities"]
    }
