"""The peers of `bench/search.py`, each by its library's own code through its ask and tell, and the one-epoch baseline.

Each library is imported where it is used, so that each may be in an environment of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench.tables import BUDGETS, Method

FIRST, ETA = 4, 3  # the rungs of our default


class Optuna:
    """Optuna's sampler and pruner by ask and tell; a trial whose last value is not finite fails."""

    def __init__(self, sampler: str, pruner: str, dimensions: int, length: int, seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        pruners: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
            "none": optuna.pruners.NopPruner,
            "median": optuna.pruners.MedianPruner,
            "median from 4": lambda: optuna.pruners.MedianPruner(n_warmup_steps=4),
            "halving": optuna.pruners.SuccessiveHalvingPruner,
            "halving from 4": lambda: optuna.pruners.SuccessiveHalvingPruner(4, 3),  # the rungs of our default
            "hyperband": lambda: optuna.pruners.HyperbandPruner(max_resource=length),
            "hyperband from 4": lambda: optuna.pruners.HyperbandPruner(4, length, 3),
        }
        samplers = {
            "random": optuna.samplers.RandomSampler,
            "tpe": optuna.samplers.TPESampler,
            "gp": optuna.samplers.GPSampler,
        }
        self._states = optuna.trial.TrialState
        self._study = optuna.create_study(
            sampler=samplers[sampler](seed=seed), pruner=pruners[pruner](), direction="minimize"
        )
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


class Hebo(Optuna):
    """HEBO proposes and is told the last loss of each trial; a pruner of Optuna's stops them."""

    def __init__(self, pruner: str, dimensions: int, length: int, seed: int) -> None:
        from hebo.design_space.design_space import DesignSpace  # pyright: ignore[reportMissingImports]
        from hebo.optimizers.hebo import HEBO  # pyright: ignore[reportMissingImports]

        super().__init__("random", pruner, dimensions, length, seed)
        np.random.seed(seed)
        space = DesignSpace().parse([{"name": name, "type": "num", "lb": 0.0, "ub": 1.0} for name in self._space])
        self._hebo = HEBO(space, scramble_seed=seed)
        self._suggestions: list[Any] = []

    def next(self) -> tuple[int, Sequence[float] | None]:
        self._suggestions.append(suggestion := self._hebo.suggest())
        self._study.enqueue_trial({name: float(suggestion[name].iloc[0]) for name in self._space})
        return super().next()

    def report(self, number: int, epoch: int, loss: float, done: bool) -> bool:
        if super().report(number, epoch, loss, done):
            return True
        self._hebo.observe(self._suggestions[number], np.array([[loss]]))
        return False


class Rungs(ABC):
    """A library that asks for a configuration at a number of epochs, and later for the same one at more.

    Such a trial goes on from where it is. A value that is not finite ends it as a failure.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._asked: dict[int, tuple[int, Any]] = {}  # trial -> the epochs to train it to, and the library's request

    @abstractmethod
    def ask(self) -> tuple[Any, Sequence[float], int, Any]:
        """Returns what identifies the configuration, its point, the epochs to train it to, and the request."""

    @abstractmethod
    def tell(self, request: Any, loss: float) -> None:
        """Tells the library the loss of the last epoch."""

    def next(self) -> tuple[int, Sequence[float] | None]:
        key, point, epochs, request = self.ask()
        is_new = key not in self._numbers
        number = self._numbers.setdefault(key, len(self._numbers))
        self._asked[number] = epochs, request
        return number, point if is_new else None

    def report(self, number: int, epoch: int, loss: float, done: bool) -> bool:
        epochs, request = self._asked[number]
        if math.isfinite(loss) and epoch < epochs and not done:
            return True
        self.tell(request, loss)
        return False


class Smac(Rungs):
    """SMAC's MultiFidelityFacade: a random forest and Hyperband; a failure costs as much as the worst loss so far.

    Its first proposals are a quarter of its `n_trials`, 100 by default, and are drawn at random.
    """

    def __init__(self, dimensions: int, length: int, seed: int) -> None:
        import ConfigSpace  # pyright: ignore[reportMissingImports]
        import smac  # pyright: ignore[reportMissingImports]
        from smac.runhistory import StatusType, TrialValue  # pyright: ignore[reportMissingImports]

        super().__init__()
        self._names, self._worst = [f"x{i}" for i in range(dimensions)], 0.0
        space = ConfigSpace.ConfigurationSpace(dict.fromkeys(self._names, (0.0, 1.0)), seed=seed)
        self._directory = TemporaryDirectory()  # it writes its scenario
        scenario = smac.Scenario(
            space,
            output_directory=Path(self._directory.name),
            deterministic=True,
            min_budget=FIRST,
            max_budget=length,
            seed=seed,
        )
        self._facade = smac.MultiFidelityFacade(scenario, None, logging_level=False, overwrite=True)
        self._value, self._failed = TrialValue, StatusType.CRASHED

    def ask(self) -> tuple[Any, Sequence[float], int, Any]:
        trial = self._facade.ask()
        return trial.config, [float(trial.config[name]) for name in self._names], round(trial.budget), trial

    def tell(self, request: Any, loss: float) -> None:
        finite = math.isfinite(loss)
        self._worst = max(self._worst, loss) if finite else self._worst
        value = self._value(loss) if finite else self._value(self._worst, status=self._failed)
        self._facade.tell(request, value, save=False)


class Neps(Rungs):
    """An algorithm of NePS by its AskAndTell; no dimension has a prior."""

    def __init__(self, algorithm: str, dimensions: int, length: int, seed: int) -> None:
        import random

        import neps  # pyright: ignore[reportMissingImports]
        import torch

        super().__init__()
        for seeded in (random.seed, np.random.seed, torch.manual_seed):  # it draws from the global generators
            seeded(seed)
        self._names = [f"x{i}" for i in range(dimensions)]
        space = neps.SearchSpace(
            {name: neps.HPOFloat(0.0, 1.0) for name in self._names}
            | {"epochs": neps.HPOInteger(FIRST, length, is_fidelity=True)}
        )
        self._library = neps.AskAndTell(getattr(neps.algorithms, algorithm)(space, eta=ETA))

    def ask(self) -> tuple[Any, Sequence[float], int, Any]:
        trial = self._library.ask()
        identifier = trial.metadata.id.split("_rung_")[0]
        return identifier, [float(trial.config[name]) for name in self._names], trial.config["epochs"], trial

    def tell(self, request: Any, loss: float) -> None:
        self._library.tell(request, loss if math.isfinite(loss) else ArithmeticError(f"loss {loss}"))


class OneEpoch:
    """Half of so many curves' epochs go to random configurations, one epoch each; then the best are trained in full.

    Romain Egele et al. 2023, "Is One Epoch All You Need For Multi-Fidelity Hyperparameter Optimization?",
    arXiv 2307.15422. So the best k are half as many as the curves; beyond that budget the next best follow.
    """

    def __init__(self, curves: int, dimensions: int, length: int, seed: int) -> None:
        self._random, self._dimensions = np.random.default_rng(seed), dimensions
        self._first, self._begun = curves * length // 2, 0
        self._losses: dict[int, float] = {}  # of the first epoch, of trials that are not chosen yet
        self._chosen: set[int] = set()

    def next(self) -> tuple[int, Sequence[float] | None] | None:
        if self._begun < self._first:
            self._begun += 1
            return self._begun - 1, self._random.random(self._dimensions).tolist()
        if not self._losses or len(self._losses) + len(self._chosen) < self._first:
            return None
        best = min(self._losses, key=self._losses.__getitem__)
        self._chosen.add(best)
        del self._losses[best]
        return best, None

    def report(self, number: int, epoch: int, loss: float, done: bool) -> bool:
        if number not in self._chosen:
            self._losses[number] = loss if math.isfinite(loss) else math.inf
            return False
        return math.isfinite(loss) and not done


LIBRARIES = ("optuna", "syne-tune", "hebo", "smac", "neps", "one-epoch")


def is_peer(name: str) -> bool:
    return name == "random" or name.startswith(tuple(f"{library} " for library in LIBRARIES))


def peers(dimensions: int, length: int, seed: int) -> dict[str, Callable[[], Method]]:
    """Every peer by its name, which begins with its library's."""
    size = (dimensions, length, seed)
    pruners = ("median", "halving", "hyperband")
    pairs = [
        *product(("random", "tpe"), (*pruners, *(f"{pruner} from {FIRST}" for pruner in pruners))),
        ("gp", f"halving from {FIRST}"),
    ]
    found: dict[str, Callable[[], Method]] = {
        f"optuna {sampler} + {pruner}": lambda sampler=sampler, pruner=pruner: Optuna(sampler, pruner, *size)
        for sampler, pruner in pairs
    }
    for name in ("ASHA", "ASHABORE", "ASHACQR", "BORE", "CQR"):
        found[f"syne-tune {name}"] = lambda name=name: SyneTune(name, *size)
    for pruner in ("none", f"halving from {FIRST}"):
        found[f"hebo + {pruner}"] = lambda pruner=pruner: Hebo(pruner, *size)
    found[f"smac hyperband from {FIRST}"] = lambda: Smac(*size)
    for algorithm in ("asha", "priorband"):
        found[f"neps {algorithm} from {FIRST}"] = lambda algorithm=algorithm: Neps(algorithm, *size)
    for curves in BUDGETS:
        found[f"one-epoch top-{curves // 2} for {curves} curves"] = lambda curves=curves: OneEpoch(curves, *size)
    return found
