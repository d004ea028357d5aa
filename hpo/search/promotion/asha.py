"""Asynchronous successive halving with promotion (Li et al. 2020, "A System for Massively Parallel Hyperparameter
Tuning", MLSys, algorithm 2): every trial waits at its rung with its checkpoint until it is among the best there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from hpo.search.curves import Group
from hpo.search.pareto import is_nan
from hpo.search.promotion.base import Order, RungView
from hpo.search.strategies.asha import Asha
from hpo.search.strategies.base import Curve, History
from trainer.report import CONTINUE, Verdict


class AshaPromote(Asha):
    """Rungs as `asha` has them, but from epoch 1 on, since a trial that pauses is not lost. Of n losses recorded at a
    rung the best floor(n / eta) go on, the rest pause.

    A paused trial goes on once it is among them, since others have come to the rung; trials of the highest rung first,
    there the best first, of equal losses the lower number. The one that would be chosen as it arrives does not pause.
    A loss that is not finite stops its trial, and counts at the rung as the worst.

    Once no more trials come and none goes on by that rule, the best of every rung does even where floor(n / eta) is 0,
    so that a study ends with its winner trained in full; what still waits then ends as pruned.
    """

    name: Literal["asha-promote"] = "asha-promote"  # pyright: ignore[reportIncompatibleVariableOverride]
    min_epochs: int = Field(default=1, ge=1)

    def decide(self, history: History) -> Verdict:
        epoch, curve = history.epoch, history.curve
        rung = self.rung(epoch)
        if rung is None or (len(curve) > 1 and self.rung(curve[-2][0]) == rung):
            return CONTINUE
        if is_nan(history.value):
            return Verdict("stop", reason=f"the objective is not finite at rung {rung} (epoch {epoch})")
        order = history.order(*self._span(rung))
        place, keep = order.index(history.number), len(order) // self.eta
        if place < keep and not self._waits(history, order[:place], rung) and not self.is_top(history, rung):
            return CONTINUE
        return Verdict(
            "pause", reason=f"rank {place + 1} of {len(order)} at rung {rung} (epoch {epoch}); the best {keep} go on"
        )

    def _waits(self, history: History, numbers: Sequence[int], rung: int) -> bool:
        """Whether one of these trials is paused at the rung."""
        waiting = history.curves(("paused",))
        return any(number in waiting and self.rung(waiting[number][-1][0]) == rung for number in numbers)

    def is_top(self, history: History, rung: int) -> bool:
        """Whether no trial goes on from the rung."""
        return False

    def promote(self, board: RungView, last: bool) -> Sequence[int]:
        return self.going_on(board, last)

    def going_on(self, board: RungView, last: bool, group: Group | None = None) -> Sequence[int]:
        """Those of `promote` where a group of trials is held against each other alone."""
        top = self.top(board.order, board.curves)
        return self._best(board, 0, top, group) or (self._best(board, 1, math.inf, group) if last else [])

    def top(self, order: Order, curves: Mapping[int, Curve]) -> float:
        """The lowest rung from which no trial goes on."""
        return math.inf

    def _best(self, board: RungView, at_least: int, top: float, group: Group | None) -> list[int]:
        waiting, found = board.waiting, list[int]()
        at = {epoch: self.rung(epoch) or 0 for epoch in set(waiting.values())}
        for rung in sorted({rung for rung in at.values() if rung < top}, reverse=True):
            order = board.order(*self._span(rung), group)
            keep = max(len(order) // self.eta, at_least)
            found += [number for number in order[:keep] if number in waiting and at[waiting[number]] == rung]
        return found

    def _span(self, rung: int) -> tuple[int, float]:
        """The epochs whose first report is a trial's at the rung: from it on, and before the next one."""
        level = self.first * self.eta**rung
        return level, min(level * self.eta, self.max_epochs or math.inf)
