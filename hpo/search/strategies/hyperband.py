"""Hyperband (Li et al. 2018, JMLR 18:185) by stopping: brackets that differ in how early they stop."""

from __future__ import annotations

from binascii import crc32
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from hpo.search.curves import Group
from hpo.search.strategies.asha import Asha
from hpo.search.strategies.base import Curve, History
from trainer.report import CONTINUE, Verdict


class Hyperband(BaseModel):
    """Brackets of ASHA, each with its first rung eta times as late as the one before; a trial is in one of them.

    min_epochs   r, the first rung of bracket 0
    eta          the reduction factor, 2 or more
    max_epochs   R, the full length of a trial; None takes that of the longest one complete so far, and stops nothing
                 before there is one
    seed         another one deals the trials out anew

    There are floor(log_eta(R / r)) + 1 brackets. Bracket b gets the share of trials that algorithm 1 gives
    s = s_max - b: n = ceil((s_max + 1) eta^s / (s + 1)). Which trial goes where is a function of its number, `seed` and
    how many brackets there are. With `max_epochs` that is once and for all; without it a longer complete trial may add
    a bracket, and all trials are dealt out anew: give it where their lengths differ. A decision is the same after any
    restart; it holds a trial against those that are in its bracket as of then. Decides as
    optuna.pruners.HyperbandPruner does for a study named by `seed`, where every epoch is reported.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    several: ClassVar[bool] = True
    rungs: ClassVar[bool] = True
    name: Literal["hyperband"] = "hyperband"
    min_epochs: int = Field(default=1, ge=1)
    eta: int = Field(default=3, ge=2)
    max_epochs: int | None = Field(default=None, ge=1)
    seed: int = 0

    def wants(self, epoch: int) -> bool:
        return epoch >= self.min_epochs and (self.max_epochs is None or epoch < self.max_epochs)

    def brackets(self, max_epochs: int) -> list[int]:
        """How many trials of a round each bracket gets, by its number; at least one bracket."""
        last = 0
        while self.min_epochs * self.eta ** (last + 1) <= max_epochs:
            last += 1
        return [-(-(last + 1) * self.eta**s // (s + 1)) for s in range(last, -1, -1)]

    def bracket(self, number: int, sizes: Sequence[int]) -> int:
        """The bracket of trial `number`, of those that have `sizes`."""
        place = crc32(f"{self.seed}_{number}".encode()) % sum(sizes)
        for bracket, size in enumerate(sizes):
            place -= size
            if place < 0:
                return bracket
        raise AssertionError("a place below the sum of the sizes is in one of them")

    def decide(self, history: History) -> Verdict:
        max_epochs = self.max_epochs or max(
            (curve[-1][0] for curve in history.curves(("complete",)).values() if curve), default=0
        )
        if not max_epochs:
            return CONTINUE
        sizes = self.brackets(max_epochs)
        own = self.bracket(history.number, sizes)
        asha = Asha(min_epochs=self.min_epochs * self.eta**own, eta=self.eta, max_epochs=max_epochs)
        return asha.decide(Among(history, Bracket(self, tuple(sizes), own)))


@dataclass(frozen=True)
class Bracket:
    """The trials that `dealing` puts into the bracket of a number, of those that have `sizes`."""

    dealing: Hyperband
    sizes: tuple[int, ...]
    number: int

    def __call__(self, trial: int) -> bool:
        return self.dealing.bracket(trial, self.sizes) == self.number


class Among:
    """A history in which the others are those of a group."""

    def __init__(self, history: History, group: Group) -> None:
        self._history, self._group = history, group
        self.number, self.epoch = history.number, history.epoch

    @property
    def value(self) -> Any:
        return self._history.value

    @property
    def curve(self) -> Curve:
        return self._history.curve

    def at(self, epoch: int) -> Mapping[int, Any]:
        known = self._history.at(epoch)
        return {number: known[number] for number in filter(self._group, known)}

    def order(self, epoch: int, beyond: float, group: Group | None = None) -> Sequence[int]:
        assert group is None, "a group is not divided again"
        return self._history.order(epoch, beyond, self._group)

    def curves(self, states: Collection[str] = ("complete",)) -> Mapping[int, Curve]:
        known = self._history.curves(states)
        return {number: known[number] for number in filter(self._group, known)}

    def checkpoint(self, number: int) -> str | None:
        return self._history.checkpoint(number)
