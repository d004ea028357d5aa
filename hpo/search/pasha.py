"""Progressive ASHA (Bohdal et al. 2023, "PASHA: Efficient HPO and NAS with Progressive Resource Allocation", ICLR):
the highest rung is raised only while the ranking of the trials there still changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations, pairwise
from typing import ClassVar, Literal

from pydantic import Field

from hpo.curves import first_losses
from hpo.domination import ranked
from hpo.ledger.tables import STATES
from hpo.search.asha_promote import AshaPromote
from hpo.search.strategy import Curve, History

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
        return rung >= self.top({**history.curves(STATES), history.number: history.curve})

    def top(self, curves: Mapping[int, Curve]) -> int:
        top = 1
        while not self._agree(curves, top):
            top += 1
        return top

    def _agree(self, curves: Mapping[int, Curve], top: int) -> bool:
        below = first_losses(curves, *self._span(top - 1))
        above = first_losses({number: curves[number] for number in below}, *self._span(top))
        among = {number: curves[number] for number in above if math.isfinite(above[number] + below[number])}
        if len(among) < 2:
            return True
        orders = (ranked(first_losses(among, *self._span(rung))) for rung in (top, top - 1))
        pairs = zip(*orders, strict=True)
        apart = max(abs(below[one] - below[other]) for one, other in pairs)
        return apart == 0.0 or apart <= self._tolerance(among)

    def _tolerance(self, curves: Mapping[int, Curve]) -> float:
        apart = []
        for one, other in combinations([curves[number] for number in sorted(curves)[-NEWEST:]], 2):
            second = dict(other)
            gaps = [loss - second[epoch] for epoch, loss in one if epoch in second]
            gaps = [gap for gap in gaps if gap and math.isfinite(gap)]
            if sum(before * after < 0 for before, after in pairwise(gaps)) >= 2:
                apart.append(abs(gaps[-1]))
        if not apart:
            return 0.0
        place = self.percentile / 100 * (len(apart) - 1)
        low, apart = math.floor(place), sorted(apart)
        return apart[low] + (place - low) * (apart[min(low + 1, len(apart) - 1)] - apart[low])
