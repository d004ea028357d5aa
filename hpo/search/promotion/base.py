"""Defines the contract of strategies that pause trials at rungs and promote the best of them.

`decide` pauses a trial, inside the transaction of its report; the driver calls `promote` whenever a trial has paused or
ended. Both are functions of the ledger's contents, so a restart changes neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from hpo.search.curves import Curve, Group, Rankings, first_losses
from hpo.search.pareto import ranked
from hpo.search.strategies.base import History, Strategy
from hpo.search.strategies.registry import make_strategy
from trainer.report import Verdict

Point = tuple[float, ...]


class Order(Protocol):
    """Ranks the trials (of a group) that have reported within [epoch, beyond) by their first loss there."""

    def __call__(self, epoch: int, beyond: float, group: Group | None = None, /) -> Sequence[int]: ...


@dataclass(frozen=True)
class RungView:
    """All trials of a study by number.

    curves   their curves of (epoch, loss), ascending
    points   the features of their configurations, each in [0, 1], where the sampler is a Featuring one
    known    a ranking of all trials, if there is one already
    by_best  whether the study judges a trial by the least loss of its curve, not by the last
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
        """Returns number -> epoch of each paused trial that has reported.

        A user's own training loop may pause before its first report.
        """
        paused = (number for number, state in self.states.items() if state == "paused")
        return {number: curve[-1][0] for number in paused if (curve := self.curves.get(number))}

    def furthest(self) -> RungView:
        """Returns a view in which only the longest trained paused trials wait."""
        last = max(self.waiting.values(), default=0)
        behind = {number for number, epoch in self.waiting.items() if epoch < last}
        return replace(self, states={n: "pruned" if n in behind else state for n, state in self.states.items()})


class KnownRungs:
    """Holds the curves and states of the trials that a sampler knows, and updates their rankings as curves grow."""

    def __init__(self, by_best: bool) -> None:
        self._by_best = by_best
        self._curves, self._states = dict[int, Curve](), dict[int, str]()
        self._rankings = Rankings(self._curves)

    def put(self, number: int, state: str, curve: Curve) -> None:
        """Sets the state and the curve of a trial."""
        self._curves[number], self._states[number] = curve, state
        self._rankings.put(number)

    def view(self, points: Mapping[int, Point]) -> RungView:
        """Returns the view by which a strategy promotes trials."""
        return RungView(self._curves, self._states, points, self._order, self._by_best)

    def _order(self, epoch: int, beyond: float, group: Group | None = None) -> Sequence[int]:
        return self._rankings.of(epoch, beyond, group).order


@runtime_checkable
class PromotionStrategy(Strategy, Protocol):
    """A strategy that pauses trials and chooses which of them continue."""

    def promote(self, board: RungView, last: bool) -> Sequence[int]:
        """Returns the paused trials that may continue now, in the order in which they start. Pure.

        last  whether no more trials will be asked for; a trial that then waits and is never promoted ends as pruned
        """
        ...


@runtime_checkable
class Waiting(Protocol):
    """A promotion strategy under which trials can pause in order."""

    def wait(self, history: History) -> Verdict:
        """Returns the verdict in order: a pause at each rung, independent of other trials' reports. Pure."""
        ...


@runtime_checkable
class Featuring(Protocol):
    """A sampler that exposes the features of its configurations."""

    def features(self) -> Mapping[int, Point]:
        """Returns the features of every trial that it knows, by number."""
        ...


def promoting(spec: str | Mapping[str, Any]) -> PromotionStrategy | None:
    """Returns the strategy of a specification if it promotes trials, else None."""
    strategy = make_strategy(spec)
    return strategy if isinstance(strategy, PromotionStrategy) else None
