"""Defines Hyperband (Li et al. 2018, JMLR 18:185) with promotion: brackets of `asha-promote` from different rungs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import ClassVar, Literal

from pydantic import Field

from hpo.search.promotion.asha import AshaPromote
from hpo.search.promotion.base import RungView
from hpo.search.strategies.base import BaseStrategy, History
from hpo.search.strategies.hyperband import Among, Bracket, Hyperband
from trainer.report import Verdict


class HyperbandPromote(BaseStrategy):
    """Deals the trials to brackets, whose first rungs are each eta times as late as the previous bracket's.

    min_epochs   r, the first rung of bracket 0
    eta          the reduction factor, 2 or more
    brackets     s_max + 1; bracket b gets the share of trials that `hyperband` gives it
    max_epochs   no rung at or above it; None puts no bound
    seed         of the deal of trials to brackets

    A trial is compared with those of its own bracket. Where several trials may continue, the one that has trained
    longest comes first; at the end of the study the best of every bracket is trained to its end.
    """

    several: ClassVar[bool] = True
    rungs: ClassVar[bool] = True
    name: Literal["hyperband-promote"] = "hyperband-promote"
    min_epochs: int = Field(default=1, ge=1)
    eta: int = Field(default=3, ge=2)
    brackets: int = Field(default=3, ge=1, le=20)
    max_epochs: int | None = Field(default=None, ge=1)
    seed: int = 0

    def wants(self, epoch: int) -> bool:
        return epoch >= self.min_epochs and (self.max_epochs is None or epoch < self.max_epochs)

    def bracket(self, number: int) -> int:
        """Returns the bracket of a trial."""
        return next(group.number for group in self._groups if group(number))

    @cached_property
    def _groups(self) -> Sequence[Bracket]:
        """Returns the brackets, which select their trials by number."""
        dealing = Hyperband(min_epochs=self.min_epochs, eta=self.eta, seed=self.seed)
        sizes = tuple(dealing.brackets(self.min_epochs * self.eta ** (self.brackets - 1)))
        return [Bracket(dealing, sizes, number) for number in range(self.brackets)]

    def asha(self, bracket: int) -> AshaPromote:
        """Returns the strategy that decides within a bracket."""
        first = self.min_epochs * self.eta**bracket
        return AshaPromote(min_epochs=first, eta=self.eta, max_epochs=self.max_epochs)

    def decide(self, history: History) -> Verdict:
        bracket = self.bracket(history.number)
        return self.asha(bracket).decide(Among(history, self._groups[bracket]))

    def wait(self, history: History) -> Verdict:
        """Returns the verdict in ordered mode: a pause at each rung of the trial's bracket."""
        return self.asha(self.bracket(history.number)).wait(history)

    def promote(self, board: RungView, last: bool) -> Sequence[int]:
        numbers = (self.asha(group.number).going_on(board, last, group) for group in self._groups)
        return sorted(chain.from_iterable(numbers), key=lambda number: -board.curves[number][-1][0])
