"""Promotion: trials pause at rungs, and the best of them go on. The contract of strategies that let them.

`decide` pauses a trial, inside the transaction of its report; the driver asks `promote` whenever a trial has paused or
ended. Both are functions of what the ledger holds, so a restart changes neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from hpo.search.curves import Group, first_losses
from hpo.search.pareto import ranked
from hpo.search.strategies.base import Curve, Strategy, make_strategy

Point = tuple[float, ...]


class Order(Protocol):
    """The trials (of a group) that have reported within [epoch, beyond) by the first loss there, best first."""

    def __call__(self, epoch: int, beyond: float, group: Group | None = None, /) -> Sequence[int]: ...


@dataclass(frozen=True)
class RungView:
    """All trials of a study by number: their curves of (epoch, loss), ascending, and their states.

    `points` are the features of their configurations, each in [0, 1], where the sampler is a Featuring one. `known` is
    what knows the order of them all already. `by_best` says that the study judges a trial by the least loss of its
    curve, and not by the last.
    """

    curves: Mapping[int, Curve]
    states: Mapping[int, str]
    points: Mapping[int, Point] = field(default_factory=dict[int, Point])
    known: Order | None = None
    by_best: bool = False

    def order(self, epoch: int, beyond: float, group: Group | None = None) -> Sequence[int]:
        if self.known:
            return self.known(epoch, beyond, group)
        return ranked(first_losses(self.curves, epoch, beyond, group))

    @cached_property
    def waiting(self) -> Mapping[int, int]:
        """Number -> epoch of the paused trials, but for those that have not reported: a loop of the user's own may
        pause before it does."""
        paused = (number for number, state in self.states.items() if state == "paused")
        return {number: curve[-1][0] for number in paused if (curve := self.curves.get(number))}

    def furthest(self) -> RungView:
        """The same, but of the paused trials only those that have come furthest wait."""
        last = max(self.waiting.values(), default=0)
        behind = {number for number, epoch in self.waiting.items() if epoch < last}
        return replace(self, states={n: "pruned" if n in behind else state for n, state in self.states.items()})


@runtime_checkable
class PromotionStrategy(Strategy, Protocol):
    """A strategy under which trials pause, and that says which go on."""

    def promote(self, board: RungView, last: bool) -> Sequence[int]:
        """The paused trials that may go on now, those first that are to go first. Pure.

        `last` says that no trial will be asked for any more: whatever then waits and never goes on ends as pruned.
        """
        ...


@runtime_checkable
class Featuring(Protocol):
    """A sampler that shows what it makes of configurations."""

    def features(self) -> Mapping[int, Point]:
        """Of every trial it knows of, by number."""
        ...


def promoting(spec: str | Mapping[str, Any]) -> PromotionStrategy | None:
    """The strategy of a specification where it is one of these."""
    strategy = make_strategy(spec)
    return strategy if isinstance(strategy, PromotionStrategy) else None
