"""The methods of `bench/search.py`: the product's own strategies and samplers, and the peers as their libraries give
them. Each library is imported where it is used, so that each may be in an environment of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from bench.tables import Method


class Ours:
    """The product's own samplers and strategies, driven as its driver does.

    strategy   None for the default one
    window     of ordered mode: a trial begins once all that are so many before it have ended, and knows of those alone,
               but at a rung of all before it; None for async
    """

    def __init__(
        self,
        sampler: str,
        strategy: str | Mapping[str, Any] | None,
        dimensions: int,
        seed: int,
        window: int | None = None,
    ) -> None:
        from hpo import Float, Objective
        from hpo.search.promotion.base import PromotionStrategy
        from hpo.search.samplers.registry import make_sampler
        from hpo.search.strategies.base import DEFAULT, make_strategy
        from hpo.space.space import Space

        space = Space({f"x{i}": Float(0.0, 1.0) for i in range(dimensions)})
        self._sampler = make_sampler(sampler, space, [Objective("loss", select="best")], seed)
        self._strategy = make_strategy(DEFAULT if strategy is None else strategy)
        self._promoting = self._strategy if isinstance(self._strategy, PromotionStrategy) else None
        self._names, self._window = list(space.dimensions), window
        self._curves: dict[int, list[tuple[int, float]]] = {}
        self._states: dict[int, str] = {}
        self._coordinates: dict[int, dict[str, Any]] = {}
        self._told = 0  # ordered: the trials before this one have been

    def next(self) -> tuple[int, Sequence[float] | None] | None:
        from hpo.search.promotion.base import Featuring, RungView

        if self._promoting and "paused" in self._states.values():
            points = self._sampler.features() if isinstance(self._sampler, Featuring) else {}
            board = RungView(self._curves, self._states, points, by_best=True)
            for number in self._promoting.promote(board, last=False):
                self._states[number] = "running"
                self._sampler.adopt(self._record(number).open())
                return number, None
        number = len(self._states)
        if self._window is not None and not self._tell_up_to(number - self._window):
            return None
        self._coordinates[number] = self._sampler.ask(number).coordinates
        self._states[number], self._curves[number] = "running", []
        return number, [self._coordinates[number][name] for name in self._names]

    def _tell_up_to(self, last: int) -> bool:
        """Tell the sampler of all trials up to this one, if they have ended."""
        if any(self._states[number] == "running" for number in range(self._told, last + 1)):
            return False
        for number in range(self._told, last + 1):
            self._sampler.tell(self._record(number))
        self._told = max(self._told, last + 1)
        return True

    def report(self, number: int, epoch: int, loss: float, done: bool) -> bool:
        from hpo.search.strategies.base import TableHistory

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
        values = (min(loss for _, loss in curve if math.isfinite(loss)),) if state == "complete" else None
        return TrialRecord(number, state, self._coordinates[number], values, list(curve))


class Optuna:
    """Optuna's sampler and pruner by ask and tell; a trial whose last value is not finite fails."""

    def __init__(self, sampler: str, pruner: str, dimensions: int, length: int, seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        pruners: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
            "median": optuna.pruners.MedianPruner,
            "halving": optuna.pruners.SuccessiveHalvingPruner,
            "halving from 4": lambda: optuna.pruners.SuccessiveHalvingPruner(4, 3),  # the rungs of our default
            "hyperband": lambda: optuna.pruners.HyperbandPruner(max_resource=length),
        }
        made = optuna.samplers.TPESampler(seed=seed) if sampler == "tpe" else optuna.samplers.RandomSampler(seed=seed)
        self._states = optuna.trial.TrialState
        self._study = optuna.create_study(sampler=made, pruner=pruners[pruner](), direction="minimize")
        self._space: dict[str, optuna.distributions.BaseDistribution] = {
            f"x{i}": optuna.distributions.FloatDistribution(0.0, 1.0) for i in range(dimensions)
        }
        self._trials: list[optuna.Trial] = []

    def next(self) -> tuple[int, Sequence[float] | None]:
        self._trials.append(trial := self._study.ask(self._space))
        return len(self._trials) - 1, [trial.params[name] for name in self._space]

    def report(self, number: int, epoch: int, loss: float, done: bool) -> bool:
        trial = self._trials[number]
        trial.report(loss, epoch)
        if done:
            finite = math.isfinite(loss)
            state = self._states.COMPLETE if finite else self._states.FAIL
            self._study.tell(trial, loss if finite else None, state=state)
            return False
        if trial.should_prune():
            self._study.tell(trial, state=self._states.PRUNED)
            return False
        return True


class SyneTune:
    """A scheduler of Syne Tune's by suggest and on_trial_result; a value that is not finite is a trial's error."""

    def __init__(self, name: str, dimensions: int, length: int, seed: int) -> None:
        import logging

        import numpy
        from syne_tune.backend.trial_status import Trial  # pyright: ignore[reportMissingImports]
        from syne_tune.config_space import uniform  # pyright: ignore[reportMissingImports]
        from syne_tune.optimizer import baselines  # pyright: ignore[reportMissingImports]

        logging.getLogger().setLevel(logging.ERROR)
        numpy.random.seed(seed)  # its ASHA draws brackets from there
        space = {f"x{i}": uniform(0.0, 1.0) for i in range(dimensions)}
        several = {"time_attr": "epoch", "max_t": length} if name.startswith("ASHA") else {}
        self._scheduler = getattr(baselines, name)(space, metric="loss", random_seed=seed, **several)
        self._several = bool(several)
        self._trial, self._names = Trial, list(space)
        self._trials: list[Any] = []

    def next(self) -> tuple[int, Sequence[float] | None]:
        config = self._scheduler.suggest().config
        self._trials.append(trial := self._trial(len(self._trials), config, datetime.now()))
        self._scheduler.on_trial_add(trial)
        return trial.trial_id, [config[name] for name in self._names]

    def report(self, number: int, epoch: int, loss: float, done: bool) -> bool:
        trial, result = self._trials[number], {"loss": loss, "epoch": epoch}
        if not math.isfinite(loss):
            self._scheduler.on_trial_error(trial)
            return False
        if done:
            self._scheduler.on_trial_complete(trial, result)
            return False
        goes_on = self._scheduler.on_trial_result(trial, result) == "CONTINUE"
        if not goes_on and not self._several:
            raise AssertionError("a scheduler of whole trials stops none")
        return goes_on


def is_peer(name: str) -> bool:
    return name == "random" or name.startswith(("optuna ", "syne-tune "))


def methods(dimensions: int, length: int, seed: int, workers: int = 1) -> dict[str, Callable[[], Method]]:
    """Every method by its name; peers are named after their library."""
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
    halvings = [(sampler, pruner) for pruner in ("halving", "halving from 4") for sampler in ("random", "tpe")]
    for sampler, pruner in (("tpe", "median"), *halvings, ("tpe", "hyperband")):
        found[f"optuna {sampler} + {pruner}"] = lambda sampler=sampler, pruner=pruner: Optuna(
            sampler, pruner, dimensions, length, seed
        )
    for name in ("ASHA", "ASHABORE", "ASHACQR", "BORE", "CQR"):
        found[f"syne-tune {name}"] = lambda name=name: SyneTune(name, dimensions, length, seed)
    return found
