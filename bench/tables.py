"""Real learning curves as tables, and their replay in simulated time.

A method proposes in the unit cube, logarithmic where a dimension is; the nearest configuration that was not run yet
runs. A point of a curve costs one unit of the budget and of time. Regret is (best value seen at any point of any curve
- the table's best) / (median - best), over the configurations' best values; a value that is not finite never counts.
"""

from __future__ import annotations

import gzip
import heapq
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

BUDGETS = (10, 30)  # whole curves
HALVES = ("choose", "report")  # every second task of a set by name, from the first; the others


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

    @property
    def length(self) -> int:
        return self.curves.shape[1]

    @property
    def dimensions(self) -> int:
        return self.cube.shape[1]

    def regret(self, seen: float) -> float:
        return (seen - self.best) / (self.median - self.best)


def halved(tables: Sequence[Table], half: str | None) -> list[Table]:
    """The tasks of one of HALVES, or all."""
    return list(tables) if half is None else list(tables)[HALVES.index(half) :: 2]


def lcbench(directory: Path) -> Iterator[Table]:
    """Validation accuracy, negated (Zimmer et al. 2021, by YAHPO's surrogate): 17 tasks of 1000 x 52."""
    with np.load(directory / "lcbench" / "table_17x1000x52.npz") as found:
        names = [name for name in found.files if name not in ("tasks", "metrics", "curves")]
        logs = ("batch_size", "learning_rate", "weight_decay", "max_units")
        cube = _cube({name: found[name] for name in names}, logs)
        accuracy = found["curves"][..., list(found["metrics"]).index("val_accuracy")].astype(float)
        for task, curves in sorted(zip(found["tasks"].tolist(), accuracy, strict=True), key=lambda pair: str(pair[0])):
            yield Table(f"lcbench {task}", cube, _finite(-curves))


def taskset(directory: Path) -> Iterator[Table]:
    """Validation loss (Metz et al. 2020): 6 tasks of 1000 x 51."""
    for path in sorted((directory / "taskset").glob("*.json.gz")):
        rows = json.loads(gzip.decompress(path.read_bytes()))
        columns = {name: np.array([row["hp"][name] for row in rows]) for name in rows[0]["hp"]}
        columns |= {name: 1 - columns[name] for name in ("beta1", "beta2")}
        curves = np.array([row["valid"]["loss"] for row in rows], dtype=float)
        yield Table(path.name.removesuffix(".json.gz"), _cube(columns, logs=tuple(columns)), _finite(curves))


SETS = {"LCBench": lcbench, "TaskSet": taskset}


def _cube(columns: dict[str, np.ndarray], logs: Sequence[str]) -> np.ndarray:
    scaled = [np.log(values) if name in logs else values.astype(float) for name, values in columns.items()]
    return np.stack([(values - values.min()) / (values.max() - values.min()) for values in scaled], axis=1)


def _finite(curves: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(curves), curves, np.nan)


class Method(Protocol):
    """A search as the replay drives it; a trial is its number."""

    def next(self) -> tuple[int, Sequence[float] | None] | None:
        """The trial to run: a paused one, or a new one with its point in the cube; None to wait for a running one."""
        ...

    def report(self, number: int, epoch: int, loss: float, done: bool) -> bool:
        """Whether the trial goes on."""
        ...


def replay(table: Table, method: Method, workers: int, budgets: Sequence[int] = BUDGETS) -> list[float]:
    """The regret at each of `budgets`; it stays as it is once the table's last configuration has ended."""
    free = np.ones(len(table.cube), dtype=bool)
    rows: dict[int, int] = {}
    reached: dict[int, int] = {}
    seen, spent, found = math.inf, 0, []
    running: list[tuple[int, int]] = []  # when a trial's next point is there, and whose
    now = 0
    while len(found) < len(budgets):
        while len(running) < workers and (free.any() or running):
            if (chosen := method.next()) is None:
                break
            number, point = chosen
            if point is not None:
                distance = np.where(free, ((table.cube - np.asarray(point)) ** 2).sum(axis=1), np.inf)
                rows[number], reached[number] = int(distance.argmin()), 0
                free[rows[number]] = False
            heapq.heappush(running, (now + 1, number))
        if not running:
            return found + [table.regret(seen)] * (len(budgets) - len(found))
        now, number = heapq.heappop(running)
        reached[number] += 1
        loss = float(table.curves[rows[number], reached[number] - 1])
        seen, spent = min(seen, loss) if math.isfinite(loss) else seen, spent + 1
        if spent == budgets[len(found)] * table.length:
            found.append(table.regret(seen))
        if len(found) < len(budgets) and method.report(number, reached[number], loss, reached[number] == table.length):
            heapq.heappush(running, (now + 1, number))
    return found
