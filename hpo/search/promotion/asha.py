"""Defines asynchronous successive halving with promotion (Li et al. 2020, "A System for Massively Parallel
Hyperparameter Tuning", MLSys, algorithm 2): every trial pauses at its rung until it is among the best there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from hpo.search.curves import Curve, Group
from hpo.search.pareto import is_nan
from hpo.search.promotion.base import Order, RungView
from hpo.search.strategies.asha import Asha
from hpo.search.strategies.base import History
from trainer.report import CONTINUE, Verdict


class AshaPromote(Asha):
    """Promotes the best floor(n / eta) of the n trials that have reported a loss at a rung; the others pause.

    The rungs are those of `asha`, but begin at epoch 1, since a paused trial is not lost. A paused trial continues once
    further trials have reached the rung and it is among the best. The highest rung comes first, then the lowest loss,
    then the lowest number. A trial that would be promoted on arrival does not pause. A loss that is not finite stops
    its trial and counts as the worst of the rung.

    Once no more trials are asked for and none is promoted by that rule, the best of every rung continues even where
    floor(n / eta) is 0, so that the study's best trial is trained in full. The trials that still wait then end as
    pruned.
    """

    name: Literal["asha-promote"] = "asha-promote"  # pyright: ignore[reportIncompatibleVariableOverride]
    min_epochs: int = Field(default=1, ge=1)
    chooses: ClassVar[str] = "the best go on"

    def wait(self, history: History) -> Verdict:
        """Returns the verdict in ordered mode: a pause at each rung, or a stop if the loss there is not finite."""
        epoch, curve = history.epoch, history.curve
        rung = self.rung(epoch)
        if rung is None or (len(curve) > 1 and self.rung(curve[-2][0]) == rung):
            return CONTINUE
        if is_nan(history.value):
            return Verdict("stop", reason=f"the objective is not finite at rung {rung} (epoch {epoch})")
        return Verdict("pause", reason=f"waits at rung {rung} (epoch {epoch}); {self.chooses}")

    def decide(self, history: History) -> Verdict:
        verdict, epoch = self.wait(history), history.epoch
        if verdict.kind != "pause":
            return verdict
        rung = self.rung(epoch) or 0
        order = history.order(*self._span(rung))
        position, keep = order.index(history.number), len(order) // self.eta
        if position < keep and not self._waits(history, order[:position], rung) and not self.is_top(history, rung):
            return CONTINUE
        return Verdict(
            "pause", reason=f"rank {position + 1} of {len(order)} at rung {rung} (epoch {epoch}); the best {keep} go on"
        )

    def _waits(self, history: History, numbers: Sequence[int], rung: int) -> bool:
        """Returns whether one of these trials is paused at the rung."""
        waiting = history.curves(("paused",))
        return any(number in waiting and self.rung(waiting[number][-1][0]) == rung for number in numbers)

    def is_top(self, history: History, rung: int) -> bool:
        """Returns whether no trial continues beyond the rung."""
        return False

    def promote(self, board: RungView, last: bool) -> Sequence[int]:
        return self.going_on(board, last)

    def going_on(self, board: RungView, last: bool, group: Group | None = None) -> Sequence[int]:
        """Returns the trials to promote if the trials of a group are compared only with each other."""
        top = self.top(board.order, board.curves)
        return self._best(board, 0, top, group) or (self._best(board, 1, math.inf, group) if last else [])

    def top(self, order: Order, curves: Mapping[int, Curve]) -> float:
        """Returns the lowest rung beyond which no trial continues."""
        return math.inf

    def _best(self, board: RungView, at_least: int, top: float, group: Group | None) -> list[int]:
        waiting, promoted = board.waiting, list[int]()
        rung_of = {epoch: self.rung(epoch) or 0 for epoch in set(waiting.values())}
        for rung in sorted({rung for rung in rung_of.values() if rung < top}, reverse=True):
            order = board.order(*self._span(rung), group)
            keep = max(len(order) // self.eta, at_least)
            promoted += [number for number in order[:keep] if number in waiting and rung_of[waiting[number]] == rung]
        return promoted

    def _span(self, rung: int) -> tuple[int, float]:
        """Returns the range of epochs of the rung: a trial's first report in it counts there; the end is excluded."""
        level = self.first * self.eta**rung
        return level, min(level * self.eta, self.max_epochs or math.inf)
