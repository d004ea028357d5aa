"""Implements Hyperband (Li et al. 2018, JMLR 18:185) by stopping: its brackets differ in how early they stop."""

from __future__ import annotations

from binascii import crc32
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from hpo.search.curves import Curve, Group
from hpo.search.strategies.asha import Asha
from hpo.search.strategies.base import BaseStrategy, History
from trainer.report import CONTINUE, Verdict


class Hyperband(BaseStrategy):
    """Runs ASHA in several brackets, each with its first rung eta times later than the last; a trial is in one bracket.

    min_epochs   r, the first rung of bracket 0
    eta          the reduction factor, 2 or more
    max_epochs   R, the full length of a trial; None: the length of the longest complete trial so far, and nothing
                 stops before a trial is complete
    seed         determines the bracket of each trial

    There are floor(log_eta(R / r)) + 1 brackets. Bracket b gets the share of trials that algorithm 1 gives to
    s = s_max - b: n = ceil((s_max + 1) eta^s / (s + 1)). The bracket of a trial is a function of its number, `seed` and
    the number of brackets. With `max_epochs` it is fixed. Without it a longer complete trial may add a bracket, which
    assigns all trials anew, so set it if trials differ in length. A decision is the same after any restart; it compares
    a trial with those in its bracket at that moment. Decides like optuna.pruners.HyperbandPruner for a study named by
    `seed`, if every epoch is reported.
    """

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
        """Returns the number of trials of a round that each bracket gets, by bracket; there is at least one bracket."""
        last = 0
        while self.min_epochs * self.eta ** (last + 1) <= max_epochs:
            last += 1
        return [-(-(last + 1) * self.eta**s // (s + 1)) for s in range(last, -1, -1)]

    def bracket(self, number: int, sizes: Sequence[int]) -> int:
        """Returns the bracket of trial `number` among brackets of these `sizes`."""
        offset = crc32(f"{self.seed}_{number}".encode()) % sum(sizes)
        for bracket, size in enumerate(sizes):
            offset -= size
            if offset < 0:
                return bracket
        raise AssertionError("a place below the sum of the sizes is in one of them")

    def decide(self, history: History) -> Verdict:
        max_epochs = self.max_epochs or max(
            (curve[-1][0] for curve in history.curves(("complete",)).values() if curve), default=0
        )
        if not max_epochs:
            return CONTINUE
        sizes = self.brackets(max_epochs)
        bracket = self.bracket(history.number, sizes)
        asha = Asha(min_epochs=self.min_epochs * self.eta**bracket, eta=self.eta, max_epochs=max_epochs)
        return asha.decide(Among(history, Bracket(self, tuple(sizes), bracket)))


@dataclass(frozen=True)
class Bracket:
    """The group of trials that `dealing` assigns to bracket `number` among brackets of these `sizes`."""

    dealing: Hyperband
    sizes: tuple[int, ...]
    number: int

    def __call__(self, trial: int) -> bool:
        return self.dealing.bracket(trial, self.sizes) == self.number


class Among:
    """A history whose other trials are limited to a group."""

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
