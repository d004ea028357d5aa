"""Hyperband (Li et al. 2018, JMLR 18:185) with promotion: brackets of `asha-promote` that begin at different rungs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from hpo.search.promotion.asha import AshaPromote
from hpo.search.promotion.base import RungView
from hpo.search.strategies.base import History
from hpo.search.strategies.hyperband import Among, Bracket, Hyperband
from trainer.report import Verdict


class HyperbandPromote(BaseModel):
    """So many brackets, the first rung of each eta times as late as that of the one before; a trial is in one of them.

    min_epochs   r, the first rung of bracket 0
    eta          the reduction factor, 2 or more
    brackets     s_max + 1; bracket b gets the share of trials that `hyperband` gives it
    max_epochs   no rung at or above it; None puts no bound
    seed         another one deals the trials out anew

    A trial is held against those of its own bracket. Where several may go on, the one that has trained longest goes
    first; at the end of the study the best of every bracket trains to its end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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
        """The bracket of a trial."""
        return next(group.number for group in self._groups if group(number))

    @cached_property
    def _groups(self) -> Sequence[Bracket]:
        """The trials of each bracket."""
        dealing = Hyperband(min_epochs=self.min_epochs, eta=self.eta, seed=self.seed)
        sizes = tuple(dealing.brackets(self.min_epochs * self.eta ** (self.brackets - 1)))
        return [Bracket(dealing, sizes, number) for number in range(self.brackets)]

    def asha(self, bracket: int) -> AshaPromote:
        """What decides within a bracket."""
        first = self.min_epochs * self.eta**bracket
        return AshaPromote(min_epochs=first, eta=self.eta, max_epochs=self.max_epochs)

    def decide(self, history: History) -> Verdict:
        own = self.bracket(history.number)
        return self.asha(own).decide(Among(history, self._groups[own]))

    def promote(self, board: RungView, last: bool) -> Sequence[int]:
        found = (self.asha(group.number).going_on(board, last, group) for group in self._groups)
        return sorted(chain.from_iterable(found), key=lambda number: -board.curves[number][-1][0])
