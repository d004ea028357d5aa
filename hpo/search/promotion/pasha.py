"""Defines progressive ASHA (Bohdal et al. 2023, "PASHA: Efficient HPO and NAS with Progressive Resource Allocation",
ICLR): the highest rung is raised only while the ranking of the trials there still changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from heapq import nlargest
from itertools import chain, combinations, pairwise
from typing import ClassVar, Literal

from pydantic import Field

from hpo.search.curves import Curve, first_loss
from hpo.search.pareto import is_nan
from hpo.search.promotion.asha import AshaPromote
from hpo.search.promotion.base import Order
from hpo.search.strategies.base import History
from hpo.space.trial_state import STATES

NEWEST = 50  # trials that the tolerance is computed from


class Pasha(AshaPromote):
    """Promotes as `asha-promote` up to a highest rung: rung 1, or a higher one while the rankings at it differ.

    percentile   the percentile of the differences that is the tolerance of a ranking (the paper's N)

    The trials that have reached the highest rung K are ranked by their losses there and at rung K - 1. The rankings
    agree if, at each place, the trial ranked there at rung K has a loss at rung K - 1 within the tolerance of the trial
    ranked there at rung K - 1 (section 4.2, soft ranking). The tolerance is the percentile of the distances of two
    trials at their last common epoch, over all pairs whose curves have crossed at least twice (section 4.3); 0 without
    such pairs. Since n trials have n^2 / 2 pairs, only the NEWEST trials of the highest rung are paired. The highest
    rung is computed anew from all reports, so it may fall again, unlike the paper's.

    Once no more trials are asked for, the best of the highest rung is trained to its end, as under `asha-promote`.
    """

    several: ClassVar[bool] = False  # its tolerance is a difference of losses
    rungs: ClassVar[bool] = False
    name: Literal["pasha"] = "pasha"  # pyright: ignore[reportIncompatibleVariableOverride]
    percentile: float = Field(default=90.0, ge=0.0, le=100.0)

    def is_top(self, history: History, rung: int) -> bool:
        return rung >= self.top(history.order, {**history.curves(STATES), history.number: history.curve})

    def top(self, order: Order, curves: Mapping[int, Curve]) -> int:
        top = 1
        while not self._agree(order, curves, top):
            top += 1
        return top

    def _agree(self, order: Order, curves: Mapping[int, Curve], top: int) -> bool:
        above, below = (self._finite(order, curves, rung) for rung in (top, top - 1))
        both = set(above).intersection(below)
        orders = (filter(both.__contains__, ranking) for ranking in (above, below))
        moved = (pair for pair in zip(*orders, strict=True) if pair[0] != pair[1])
        if not (first := next(moved, None)):
            return True
        span, tolerance = self._span(top - 1), self._tolerance([curves[n] for n in nlargest(NEWEST, both)])
        losses = ([first_loss(curves[number], *span) for number in pair] for pair in chain([first], moved))
        return all(abs(loss - other) <= tolerance for loss, other in losses)

    def _finite(self, order: Order, curves: Mapping[int, Curve], rung: int) -> Sequence[int]:
        """Returns the trials that have a finite loss at a rung, the best first."""
        numbers, span = list(order(*self._span(rung))), self._span(rung)
        while numbers and is_nan(first_loss(curves[numbers[-1]], *span)):
            numbers.pop()
        return numbers

    def _tolerance(self, curves: Sequence[Curve]) -> float:
        apart: list[float] = []
        for first, second in combinations(map(dict, curves), 2):
            gaps = [loss - second[epoch] for epoch, loss in first.items() if epoch in second]
            gaps = [gap for gap in gaps if gap and math.isfinite(gap)]
            if sum(before * after < 0 for before, after in pairwise(gaps)) >= 2:
                apart.append(abs(gaps[-1]))
        if not apart:
            return 0.0
        position = self.percentile / 100 * (len(apart) - 1)
        low, apart = math.floor(position), sorted(apart)
        return apart[low] + (position - low) * (apart[min(low + 1, len(apart) - 1)] - apart[low])
