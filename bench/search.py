"""How good a search is at a budget: real learning curves replayed in simulated time, ours beside Optuna's.

    python bench/search.py --tables DIR [--seeds 3] [--workers 1] [--tasks N] [--methods NAME,...] [--half even|odd]

DIR holds lcbench/table_17x1000x52.npz (Zimmer et al. 2021, by YAHPO's surrogate; validation accuracy) and
taskset/*.json.gz (Metz et al. 2020; validation loss): 1000 configurations with 52 or 51 points each.

A method proposes in the unit cube, logarithmic where a dimension is; the nearest configuration that was not run yet
runs. A point of a curve costs one unit of the budget and of time. Regret is (best value seen at any point of any curve
- the table's best) / (median - best), over the configurations' best values; a value that is not finite never counts.
Printed after as many points as 10 and 30 whole curves have, as the mean over tasks and seeds with its standard error.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import optuna

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import machine
from hpo import Float, Objective
from hpo.search.promotion import Board, Promoting
from hpo.search.sampler import TrialRecord
from hpo.search.samplers import make_sampler
from hpo.search.strategy import TableHistory, make_strategy
from hpo.space import Space

BUDGETS = (10, 30)  # whole curves


@dataclass
class Table:
    """One task. `cube` (n, d) in [0, 1], `curves` (n, T), lower is better, NaN where a value is not finite."""

    name: str
    cube: np.ndarray
    curves: np.ndarray

    def __post_init__(self) -> None:
        best = np.nanmin(np.where(np.isnan(self.curves), np.inf, self.curves), axis=1)
        finite = best[np.isfinite(best)]
        self.best, self.median = float(finite.min()), float(np.median(finite))

    def regret(self, seen: float) -> float:
        return (seen - self.best) / (self.median - self.best)


def lcbench(directory: Path) -> Iterator[Table]:
    with np.load(directory / "lcbench" / "table_17x1000x52.npz") as found:
        names = [name for name in found.files if name not in ("tasks", "metrics", "curves")]
        cube = _cube(
            {name: found[name] for name in names}, logs=("batch_size", "learning_rate", "weight_decay", "max_units")
        )
        accuracy = found["curves"][..., list(found["metrics"]).index("val_accuracy")].astype(float)
        for task, curves in zip(found["tasks"], accuracy, strict=True):
            yield Table(f"lcbench {task}", cube, _finite(-curves))


def taskset(directory: Path) -> Iterator[Table]:
    for path in sorted((directory / "taskset").glob("*.json.gz")):
        rows = json.loads(gzip.decompress(path.read_bytes()))
        columns = {name: np.array([row["hp"][name] for row in rows]) for name in rows[0]["hp"]}
        columns |= {name: 1 - columns[name] for name in ("beta1", "beta2")}
        curves = np.array([row["valid"]["loss"] for row in rows], dtype=float)
        yield Table(path.name.removesuffix(".json.gz"), _cube(columns, logs=tuple(columns)), _finite(curves))


def _cube(columns: dict[str, np.ndarray], logs: Sequence[str]) -> np.ndarray:
    scaled = [np.log(values) if name in logs else values.astype(float) for name, values in columns.items()]
    return np.stack([(values - values.min()) / (values.max() - values.min()) for values in scaled], axis=1)


def _finite(curves: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(curves), curves, np.nan)


class Method(Protocol):
    """A search as the replay drives it; a trial is its number."""

    def next(self) -> tuple[int, Sequence[float] | None]:
        """The trial to run: a paused one, or a new one with its point in the unit cube."""
        ...

    def report(self, number: int, epoch: int, loss: float, done: bool) -> bool:
        """Whether the trial goes on."""
        ...


class _History(TableHistory):
    def checkpoint(self, number: int) -> str | None:
        return None


@dataclass
class Ours:
    """The product's own samplers and strategies, driven as its driver does in async order."""

    sampler: str
    strategy: str | dict[str, Any]
    dimensions: int
    seed: int
    curves: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    coordinates: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        space = Space({f"x{i}": Float(0.0, 1.0) for i in range(self.dimensions)})
        self._sampler = make_sampler(self.sampler, space, [Objective("loss")], self.seed)
        self._strategy = make_strategy(self.strategy)

    def next(self) -> tuple[int, Sequence[float] | None]:
        if isinstance(self._strategy, Promoting) and "paused" in self.states.values():
            board = Board(self.curves, self.states)
            for number in self._strategy.promote(board, last=False):
                self.states[number] = "running"
                self._sampler.adopt(self._record(number).open())
                return number, None
        number = len(self.states)
        self.coordinates[number] = self._sampler.ask(number).coordinates
        self.states[number], self.curves[number] = "running", []
        return number, [self.coordinates[number][f"x{i}"] for i in range(self.dimensions)]

    def report(self, number: int, epoch: int, loss: float, done: bool) -> bool:
        self.curves[number].append((epoch, loss))
        kind = "continue"
        if self._strategy.wants(epoch):
            kind = self._strategy.decide(_History(number, epoch, self.curves, self.states)).kind
        if done:
            self.states[number] = "complete" if math.isfinite(loss) else "infeasible"
        elif kind == "continue":
            return True
        else:
            self.states[number] = {"stop": "pruned", "pause": "paused"}[kind]
        self._sampler.tell(self._record(number))
        return False

    def _record(self, number: int) -> TrialRecord:
        state, curve = self.states[number], self.curves[number]
        values = (curve[-1][1],) if state == "complete" else None
        return TrialRecord(number, state, self.coordinates[number], values, curve)


class Peer:
    """Optuna's sampler and pruner by ask and tell."""

    def __init__(self, sampler: str, pruner: optuna.pruners.BasePruner, dimensions: int, seed: int) -> None:
        made = optuna.samplers.TPESampler(seed=seed) if sampler == "tpe" else optuna.samplers.RandomSampler(seed=seed)
        self._study = optuna.create_study(sampler=made, pruner=pruner, direction="minimize")
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
            state = optuna.trial.TrialState.COMPLETE if math.isfinite(loss) else optuna.trial.TrialState.FAIL
            self._study.tell(trial, loss if math.isfinite(loss) else None, state=state)
            return False
        if trial.should_prune():
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return False
        return True


def replay(table: Table, method: Method, workers: int) -> list[float]:
    """The regret at each of BUDGETS."""
    free = np.ones(len(table.cube), dtype=bool)
    length = table.curves.shape[1]
    rows: dict[int, int] = {}
    reached: dict[int, int] = {}
    seen, spent, found = math.inf, 0, []
    running: list[tuple[int, int]] = []  # when a trial's next point is there, and whose
    now = 0
    while len(found) < len(BUDGETS):
        while len(running) < workers and (free.any() or running):
            number, point = method.next()
            if point is not None:
                distance = np.where(free, ((table.cube - np.asarray(point)) ** 2).sum(axis=1), np.inf)
                rows[number], reached[number] = int(distance.argmin()), 0
                free[rows[number]] = False
            heapq.heappush(running, (now + 1, number))
        now, number = heapq.heappop(running)
        reached[number] += 1
        loss = float(table.curves[rows[number], reached[number] - 1])
        seen, spent = min(seen, loss) if math.isfinite(loss) else seen, spent + 1
        if spent == BUDGETS[len(found)] * length:
            found.append(table.regret(seen))
        if method.report(number, reached[number], loss, done=reached[number] == length):
            heapq.heappush(running, (now + 1, number))
    return found


def methods(dimensions: int, length: int, seed: int) -> dict[str, Callable[[], Method]]:
    pruners = optuna.pruners
    return {
        "random": lambda: Ours("random", "none", dimensions, seed),
        "tpe": lambda: Ours("tpe", "none", dimensions, seed),
        "tpe + median": lambda: Ours("tpe", "median", dimensions, seed),
        "random + asha": lambda: Ours("random", "asha", dimensions, seed),
        "tpe + asha": lambda: Ours("tpe", "asha", dimensions, seed),
        "random + asha-promote": lambda: Ours("random", "asha-promote", dimensions, seed),
        "random + pasha": lambda: Ours("random", "pasha", dimensions, seed),
        "tpe + asha-promote": lambda: Ours("tpe", "asha-promote", dimensions, seed),
        "optuna tpe + median": lambda: Peer("tpe", pruners.MedianPruner(), dimensions, seed),
        "optuna random + halving": lambda: Peer("random", pruners.SuccessiveHalvingPruner(), dimensions, seed),
        "optuna tpe + halving": lambda: Peer("tpe", pruners.SuccessiveHalvingPruner(), dimensions, seed),
        "optuna tpe + hyperband": lambda: Peer("tpe", pruners.HyperbandPruner(max_resource=length), dimensions, seed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tasks", type=int, help="the first so many of each set")
    parser.add_argument("--half", choices=("even", "odd"), help="every second task of each set")
    parser.add_argument("--methods", help="by default all")
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    print(machine())
    for name, tables in (("LCBench", lcbench(given.tables)), ("TaskSet", taskset(given.tables))):
        start = {"even": 0, "odd": 1, None: 0}[given.half]
        chosen = list(tables)[start :: 2 if given.half else 1][: given.tasks]
        print(
            f"{name}: {len(chosen)} tasks, {given.seeds} seeds, {given.workers} workers; regret after 10 and 30 curves"
        )
        for method in given.methods.split(",") if given.methods else methods(1, 1, 0):
            regrets = [
                replay(table, methods(table.cube.shape[1], table.curves.shape[1], seed)[method](), given.workers)
                for table in chosen
                for seed in range(given.seeds)
            ]
            shown = [
                f"{statistics.fmean(at):.3f} ± {np.std(at, ddof=1) / len(at) ** 0.5:.3f}"
                for at in zip(*regrets, strict=True)
            ]
            print(f"  {method:26} {'   '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
