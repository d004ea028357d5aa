"""Progressive ASHA (Bohdal et al. 2023, "PASHA: Efficient HPO and NAS with Progressive Resource Allocation", ICLR):
the highest rung is raised only while the ranking of the trials there still changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from heapq import nlargest
from itertools import chain, combinations, pairwise
from typing import ClassVar, Literal

from pydantic import Field

from hpo.search.curves import first_loss
from hpo.search.pareto import is_nan
from hpo.search.promotion.asha import AshaPromote
from hpo.search.promotion.base import Order
from hpo.search.strategies.base import Curve, History
from hpo.space.trial_state import STATES

NEWEST = 50  # trials that the tolerance is taken from


class Pasha(AshaPromote):
    """`asha-promote` up to a highest rung: rung 1, and above it as long as the rankings there differ.

    percentile   of the differences at which the tolerance of a ranking stands (the paper's N)

    The trials that have come to the highest rung K are ranked by their losses there and at rung K - 1. The rankings
    agree where, at each place, the trial at rung K is at rung K - 1 within the tolerance of the one that has that place
    there (section 4.2, soft ranking). The tolerance is the percentile of how far apart two trials are, at their last
    common epoch, of all pairs whose curves have crossed at least twice (section 4.3); 0 where there is no such pair.
    Of a highest rung with more than NEWEST trials those alone are paired: of n there are n^2 / 2 pairs.
    The rungs are looked at anew with all that is known, so the highest one may come down again; the paper's never does.

    Once no more trials come the best of the highest rung trains to its end, as under `asha-promote`.
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
        moved = ((one, other) for one, other in zip(*orders, strict=True) if one != other)
        if not (first := next(moved, None)):
            return True
        span, tolerance = self._span(top - 1), self._tolerance([curves[n] for n in nlargest(NEWEST, both)])
        losses = ([first_loss(curves[number], *span) for number in pair] for pair in chain([first], moved))
        return all(abs(loss - other) <= tolerance for loss, other in losses)

    def _finite(self, order: Order, curves: Mapping[int, Curve], rung: int) -> Sequence[int]:
        """The trials that have a finite loss at a rung, the best first."""
        found, span = list(order(*self._span(rung))), self._span(rung)
        while found and is_nan(first_loss(curves[found[-1]], *span)):
            found.pop()
        return found

    def _tolerance(self, curves: Sequence[Curve]) -> float:
        apart: list[float] = []
        for one, second in combinations(map(dict, curves), 2):
            gaps = [loss - second[epoch] for epoch, loss in one.items() if epoch in second]
            gaps = [gap for gap in gaps if gap and math.isfinite(gap)]
            if sum(before * after < 0 for before, after in pairwise(gaps)) >= 2:
                apart.append(abs(gaps[-1]))
        if not apart:
            return 0.0
        place = self.percentile / 100 * (len(apart) - 1)
        low, apart = math.floor(place), sorted(apart)
        return apart[low] + (place - low) * (apart[min(low + 1, len(apart) - 1)] - apart[low])
