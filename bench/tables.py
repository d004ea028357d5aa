"""Real learning curves as tables, and their replay in simulated time.

A method proposes in the unit cube, logarithmic where a dimension is; the nearest configuration that was not run yet
runs. A point of a curve costs one unit of the budget and of time; in the set LCBench-seconds, what the epoch took, in
units of the task's mean epoch. Regret is (best value seen at any point of any curve
- the table's best) / (median - best), over the configurations' best values; a value that is not finite never counts.
"""

from __future__ import annotations

import gzip
import heapq
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from hpo.search.finishing import ahead, is_within

BUDGETS = (10, 30)  # whole curves
HALVES = ("choose", "report")  # every second task of a set by name, from the first; the others


@dataclass
class Table:
    """One task. `cube` (n, d) in [0, 1], `curves` (n, T), lower is better, NaN where a value is not finite; `costs`
    (n, T) are the points' costs, 1 each where none are given."""

    name: str
    cube: np.ndarray
    curves: np.ndarray
    costs: np.ndarray = field(default_factory=lambda: np.empty(0))

    def __post_init__(self) -> None:
        if not self.costs.size:
            self.costs = np.ones(self.curves.shape)
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


def lcbench(directory: Path, *, seconds: bool = False) -> Iterator[Table]:
    """Validation accuracy, negated (Zimmer et al. 2021, by YAHPO's surrogate): 17 tasks of 1000 x 52.

    With `seconds` a point costs what its epoch took, in units of the mean epoch of its task.
    """
    with np.load(directory / "lcbench" / "table_17x1000x52.npz") as found:
        names = [name for name in found.files if name not in ("tasks", "metrics", "curves")]
        logs = ("batch_size", "learning_rate", "weight_decay", "max_units")
        cube = _cube({name: found[name] for name in names}, logs)
        columns = [found["curves"][..., list(found["metrics"]).index(name)] for name in ("val_accuracy", "time")]
        accuracy, elapsed = (column.astype(float) for column in columns)
        rows = zip(found["tasks"].tolist(), accuracy, elapsed, strict=True)
        for task, curves, times in sorted(rows, key=lambda row: str(row[0])):
            if seconds:
                yield Table(f"lcbench-seconds {task}", cube, _finite(-curves), _costs(times))
            else:
                yield Table(f"lcbench {task}", cube, _finite(-curves))


def _costs(elapsed: np.ndarray) -> np.ndarray:
    """Returns the cost of each point from the seconds (n, T) since the start of its curve; the mean cost is 1.

    A surrogate's seconds fall here and there; such a point costs nothing.
    """
    seconds = np.diff(np.maximum.accumulate(elapsed, axis=1), axis=1, prepend=0)
    return seconds / seconds.mean()


def taskset(directory: Path) -> Iterator[Table]:
    """Validation loss (Metz et al. 2020): 6 tasks of 1000 x 51."""
    for path in sorted((directory / "taskset").glob("*.json.gz")):
        rows = json.loads(gzip.decompress(path.read_bytes()))
        columns = {name: np.array([row["hp"][name] for row in rows]) for name in rows[0]["hp"]}
        columns |= {name: 1 - columns[name] for name in ("beta1", "beta2")}
        curves = np.array([row["valid"]["loss"] for row in rows], dtype=float)
        yield Table(path.name.removesuffix(".json.gz"), _cube(columns, logs=tuple(columns)), _finite(curves))


SETS = {"LCBench": lcbench, "TaskSet": taskset, "LCBench-seconds": partial(lcbench, seconds=True)}


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


OBJECTIVE = {"metric": "loss", "direction": "minimize", "select": "best"}


def end_phase(
    complete: dict[int, list[float]],
    stopped: dict[int, list[float]],
    end: Callable[[int], float],
    epochs: int,
    searched: int,
) -> int:
    """Trains stopped trials of so many epochs to their `end`, as the platform does after a search, and returns the
    epochs that it took. No checkpoint is kept: each begins again."""
    phase = 0
    while before := ahead([OBJECTIVE], complete, stopped):
        if not is_within(epochs, phase // epochs, phase, searched):
            break
        phase += epochs
        complete[before[0]] = [end(before[0])]
        del stopped[before[0]]
    return phase


def replay(table: Table, method: Method, workers: int, budgets: Sequence[int] = BUDGETS) -> list[float]:
    """The regret at each of `budgets` of the best point that was seen; it stays as it is once the table's last
    configuration has ended."""
    return [seen for seen, _ in replayed(table, method, workers, budgets)]


def named(table: Table, rows: Mapping[int, int], reached: Mapping[int, int], *, finish: bool) -> float:
    """Returns the regret of the complete trial that is named, each being judged by its best epoch; with `finish` after
    an end phase. NaN where none is named."""
    losses = np.where(np.isnan(table.curves), np.inf, table.curves)
    values = {number: [float(losses[rows[number], :epoch].min())] for number, epoch in reached.items() if epoch}
    complete = {number: value for number, value in values.items() if reached[number] == table.length}
    stopped = {number: value for number, value in values.items() if number not in complete}
    if finish:
        end_phase(complete, stopped, lambda n: float(losses[rows[n]].min()), table.length, sum(reached.values()))
    best = min((value for [value] in complete.values()), default=math.inf)
    return table.regret(best) if math.isfinite(best) else math.nan


def replayed(
    table: Table, method: Method, workers: int, budgets: Sequence[int] = BUDGETS, *, finish: bool = True
) -> list[tuple[float, float]]:
    """The regrets at each of `budgets`: of the best point that was seen, and of what would be `named` then."""
    free = np.ones(len(table.cube), dtype=bool)
    rows: dict[int, int] = {}
    reached: dict[int, int] = {}
    seen, spent, found = math.inf, 0.0, list[tuple[float, float]]()
    running: list[tuple[float, int]] = []  # when a trial's next point is there, and whose
    now = 0.0

    def begin_point(number: int) -> None:
        heapq.heappush(running, (now + float(table.costs[rows[number], reached[number]]), number))

    while len(found) < len(budgets):
        while len(running) < workers and (free.any() or running):
            if (chosen := method.next()) is None:
                break
            number, point = chosen
            if point is not None:
                distance = np.where(free, ((table.cube - np.asarray(point)) ** 2).sum(axis=1), np.inf)
                rows[number], reached[number] = int(distance.argmin()), 0
                free[rows[number]] = False
            begin_point(number)
        if not running:
            return found + [(table.regret(seen), named(table, rows, reached, finish=finish))] * (
                len(budgets) - len(found)
            )
        now, number = heapq.heappop(running)
        spent += float(table.costs[rows[number], reached[number]])
        reached[number] += 1
        loss = float(table.curves[rows[number], reached[number] - 1])
        seen = min(seen, loss) if math.isfinite(loss) else seen
        while len(found) < len(budgets) and spent >= budgets[len(found)] * table.length:
            found.append((table.regret(seen), named(table, rows, reached, finish=finish)))
        if len(found) < len(budgets) and method.report(number, reached[number], loss, reached[number] == table.length):
            begin_point(number)
    return found
