"""The methods of `bench/search.py`: the product's own strategies and samplers, beside the peers of `bench/peers.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from bench.peers import peers
from bench.tables import Method

if TYPE_CHECKING:
    from hpo.search.promotion.base import RungView
    from hpo.space.space import Space


Earlier = Mapping[str, tuple[Sequence[Sequence[float]], Sequence[float]]]  # study -> points of the cube, losses


def taught(space: Space, earlier: Earlier) -> dict[str, Any]:
    """What a study learns from earlier ones."""
    from hpo.search.knowledge import regrets, teach

    studies = {}
    for name, (points, losses) in earlier.items():
        params = [dict(zip(space.dimensions, map(float, point), strict=True)) for point in points]
        studies[name] = list(zip(params, regrets([(float(loss),) for loss in losses]), strict=True))
    return teach(space, studies)


class Ours:
    """The product's own samplers and strategies, driven as its driver does.

    strategy   None for the default one
    window     of ordered mode: a trial begins once all that are so many before it have ended, and knows of those alone,
               but at a rung of all before it; None for async
    select     the epoch that a complete trial is judged by, best or last
    likes      the densities that axes follow, by place; `strength` is the share of draws that do
    """

    def __init__(
        self,
        sampler: str,
        strategy: str | Mapping[str, Any] | None,
        dimensions: int,
        seed: int,
        window: int | None = None,
        select: Literal["last", "best"] = "best",
        earlier: Earlier | None = None,
        likes: Mapping[int, str] = MappingProxyType({}),
        strength: float = 0.5,
    ) -> None:
        from hpo import Float, Objective
        from hpo.search.promotion.base import PromotionStrategy
        from hpo.search.samplers.registry import make_sampler
        from hpo.search.strategies.registry import DEFAULT, make_strategy
        from hpo.space.space import Space

        space = Space({f"x{i}": Float(0.0, 1.0, like=likes.get(i), strength=strength) for i in range(dimensions)})
        objectives = [Objective("loss", select=select)]
        self._sampler = make_sampler(sampler, space, objectives, seed, knowledge=taught(space, earlier or {}))
        self._strategy = make_strategy(DEFAULT if strategy is None else strategy)
        self._promoting = self._strategy if isinstance(self._strategy, PromotionStrategy) else None
        self._names, self._window, self._select = list(space.dimensions), window, select
        self._curves: dict[int, list[tuple[int, float]]] = {}
        self._states: dict[int, str] = {}
        self._coordinates: dict[int, dict[str, Any]] = {}
        self._told = 0  # ordered: the trials before this one have been

    def next(self) -> tuple[int, Sequence[float] | None] | None:
        if self._promoting and "paused" in self._states.values():
            for number in self._promoting.promote(self._board(), last=False):
                self._states[number] = "running"
                self._sampler.adopt(self._record(number).open())
                return number, None
        number = len(self._states)
        if self._window is not None and not self._tell_up_to(number - self._window):
            return None
        self._coordinates[number] = self._sampler.ask(number).coordinates
        self._states[number], self._curves[number] = "running", []
        return number, [self._coordinates[number][name] for name in self._names]

    def _board(self) -> RungView:
        from hpo.search.promotion.base import Featuring, RungView

        points = self._sampler.features() if isinstance(self._sampler, Featuring) else {}
        return RungView(self._curves, self._states, points, by_best=True)

    def _tell_up_to(self, last: int) -> bool:
        """Tell the sampler of all trials up to this one, if they have ended."""
        if any(self._states[number] == "running" for number in range(self._told, last + 1)):
            return False
        for number in range(self._told, last + 1):
            self._sampler.tell(self._record(number))
        self._told = max(self._told, last + 1)
        return True

    def report(self, number: int, epoch: int, loss: float, done: bool) -> bool:
        from hpo.search.strategies.table_history import TableHistory

        self._curves[number].append((epoch, loss))
        kind = "continue"
        if self._strategy.wants(epoch):
            visible = None if self._window is None else number - self._window
            history = TableHistory(number, epoch, self._curves, self._states, visible)
            kind = self._strategy.decide(history).kind
        if kind == "continue" and not done:
            return True
        if kind == "pause" and not done:
            self._states[number] = "paused"
        elif any(math.isfinite(loss) for _, loss in self._curves[number]):
            self._states[number] = "complete" if done else "pruned"
        else:
            self._states[number] = "infeasible"
        if self._window is None:
            self._sampler.tell(self._record(number))
        return False

    def _record(self, number: int) -> Any:
        from hpo.search.samplers.base import TrialRecord

        state, curve = self._states[number], self._curves[number]
        judged = [loss for _, loss in curve[-1 if self._select == "last" else 0 :] if math.isfinite(loss)]
        values = (min(judged),) if state == "complete" and judged else None
        return TrialRecord(number, state, self._coordinates[number], values, list(curve))


class Steps(Ours):
    """The product's own samplers and strategies where trials pause in order.

    A study is a sequence of steps. A step trains a new trial to its first rung, or a paused one to its next rung or its
    end; a trial pauses at every rung. Step s is decided from exactly the results of the steps up to s - window: the
    strategy promotes a trial that waits by then, or else a new one begins. So the sequence is the same for any number
    of workers.

    reduction   of n trials at the first rung only the best floor(n / reduction) go on; None for the strategy's own
    """

    def __init__(
        self,
        sampler: str,
        strategy: str | Mapping[str, Any],
        dimensions: int,
        seed: int,
        window: int,
        reduction: int | None = None,
    ) -> None:
        from hpo.search.promotion.asha import AshaPromote

        super().__init__(sampler, strategy, dimensions, seed)
        assert isinstance(self._strategy, AshaPromote)
        self._rungs, self._delay, self._reduction = self._strategy, window, reduction
        self.steps: list[int] = []  # the trial of each
        self._ended: dict[int, tuple[str, list[tuple[int, float]]]] = {}  # step -> state and curve of its trial by then
        self._trained: dict[int, list[tuple[int, float]]] = {}  # whole curves; `_curves` holds what is known of them

    def next(self) -> tuple[int, Sequence[float] | None] | None:
        while self._told <= len(self.steps) - self._delay:
            if self._told not in self._ended:
                return None
            self._learn(self._told)
        promoted = self._promoted()
        number = len(self._trained) if promoted is None else promoted
        self.steps.append(number)
        self._states[number] = "running"
        if promoted is not None:
            return number, None
        self._coordinates[number] = self._sampler.ask(number).coordinates
        self._trained[number], self._curves[number] = [], []
        return number, [self._coordinates[number][name] for name in self._names]

    def _promoted(self) -> int | None:
        board, first = self._board(), self._rungs.first
        promoted = self._rungs.promote(board, last=False)
        if self._reduction is not None:
            order = board.order(first, first * self._rungs.eta)
            best = set(order[: len(order) // self._reduction])
            promoted = [n for n in promoted if n in best or self._rungs.rung(board.waiting[n])]
        return next(iter(promoted), None)

    def _learn(self, step: int) -> None:
        number = self.steps[step]
        self._states[number], self._curves[number] = self._ended[step]
        self._sampler.tell(self._record(number))
        self._told = step + 1

    def report(self, number: int, epoch: int, loss: float, done: bool) -> bool:
        curve = self._trained[number]
        curve.append((epoch, loss))
        if not done and self._rungs.rung(epoch) == self._rungs.rung(epoch - 1):
            return True
        if not any(math.isfinite(loss) for _, loss in curve):
            state = "infeasible"
        else:
            state = "complete" if done else "paused" if math.isfinite(loss) else "pruned"
        step = max(place for place, other in enumerate(self.steps) if other == number)
        self._ended[step] = state, list(curve)
        return False


def methods(dimensions: int, length: int, seed: int, workers: int = 1) -> dict[str, Callable[[], Method]]:
    """Every method by its name."""
    from_one = {"name": "asha", "min_epochs": 1}
    ours: dict[str, tuple[str, str | Mapping[str, Any] | None]] = {
        "random": ("random", "none"),
        "tpe + median": ("tpe", "median"),
        "random + asha": ("random", from_one),
        "tpe + asha": ("tpe", from_one),
        "random + asha-promote": ("random", "asha-promote"),
        "tpe + asha-promote": ("tpe", "asha-promote"),
        "tpe + hyperband-promote": ("tpe", "hyperband-promote"),
        "random + hyperband-promote": ("random", "hyperband-promote"),
        "random + halving": ("random", "halving"),
        "random + pasha": ("random", "pasha"),
        "bohb": ("bohb", "bohb"),
        "freeze-thaw": ("freeze-thaw", "freeze-thaw"),
    }
    found: dict[str, Callable[[], Method]] = {
        name: lambda sampler=sampler, strategy=strategy: Ours(sampler, strategy, dimensions, seed)
        for name, (sampler, strategy) in ours.items()
    }
    ordered = max(4, 2 * workers)  # as `hpo run` has it
    found["the default"] = lambda: Ours("auto", None, dimensions, seed, ordered)
    found["tpe + the default"] = lambda: Ours("tpe", None, dimensions, seed, ordered)
    for sampler, first, by in product(("random", "tpe", "freeze-thaw"), (1, 2, 4), (None, 8)):
        spec = {"name": "asha-promote", "min_epochs": first}
        name = f"{sampler} + steps from {first}" + (f" by {by}" if by else "")
        found[name] = lambda sampler=sampler, spec=spec, by=by: Steps(sampler, spec, dimensions, seed, ordered, by)
    for first in (2, 4):
        spec = {"name": "freeze-thaw", "min_epochs": first}
        found[f"freeze-thaw + steps from {first} by the model"] = lambda spec=spec: Steps(
            "freeze-thaw", spec, dimensions, seed, ordered
        )
    return found | peers(dimensions, length, seed)
