"""Computes `hpo/space/densities.json`: where the best configurations of public benchmarks lie, a hyperparameter each.

    python bench/densities.py DATA            writes the file
    python bench/densities.py DATA --regret   prints what the densities bring on tasks that they were not computed from

DATA holds LCBench (Zimmer et al. 2021, "Auto-PyTorch Tabular", by YAHPO's surrogate) and TaskSet (Metz et al. 2020,
"Using a thousand optimization tasks to learn hyperparameter search strategies") as `bench/tables.py` reads them. Every
second task of a set gives the densities (the half for choosing); the others are for the regret.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.tables import SETS, Table, halved, lcbench, taskset

TO = Path(__file__).resolve().parent.parent / "hpo" / "space" / "densities.json"
BEST = 0.05  # the share of a task's configurations that counts as good
QUANTILES = 21
SEEDS, TRIALS = 40, (4, 10, 30)
_LCBENCH = "LCBench, by YAHPO's surrogate: multilayer perceptrons on tabular data, SGD with momentum"
_TASKSET = "TaskSet: recurrent networks on IMDB text, Adam"


@dataclass(frozen=True)
class Field:
    """A hyperparameter of a set by the set's name for it."""

    column: str
    log: bool


LCBENCH = {
    "lr/sgd": Field("learning_rate", log=True),
    "momentum/sgd": Field("momentum", log=False),
    "weight_decay/sgd": Field("weight_decay", log=True),
    "batch_size/sgd": Field("batch_size", log=True),
    "dropout": Field("max_dropout", log=False),
}
TASKSET = {"lr/adam": Field("learning_rate", log=True)}  # good betas and epsilons lie nearly anywhere


def best_rows(table: Table) -> np.ndarray:
    """Returns the rows of a task's best configurations, by the best value of each curve."""
    losses = np.nanmin(np.where(np.isnan(table.curves), np.inf, table.curves), axis=1)
    return np.argsort(losses, kind="stable")[: math.ceil(BEST * len(losses))]


def quantiles(values: np.ndarray, log: bool) -> list[float]:
    """Returns the quantiles of good values, to 6 digits, ascending and without ties."""
    scaled = np.log(values) if log else values
    points = np.quantile(scaled, np.linspace(0.0, 1.0, QUANTILES))
    rounded = [float(f"{x:.6g}") for x in (np.exp(points) if log else points)]
    for k in range(1, len(rounded)):  # a density needs a width between two shares
        rounded[k] = max(rounded[k], float(f"{rounded[k - 1] + 1e-6 * max(abs(rounded[k - 1]), 1e-6):.9g}"))
    return rounded


def rows(fields: Mapping[str, Field], columns: Sequence[Mapping[str, np.ndarray]], source: str) -> list[dict[str, Any]]:
    """Returns the densities of a set; `columns` has the good values of each task by column."""
    made: list[dict[str, Any]] = []
    for name, field in fields.items():
        values = np.concatenate([task[field.column] for task in columns]).astype(float)
        shown = {"name": name, "log": field.log, "source": source, "licence": "Apache-2.0"}
        made.append(shown | {"quantiles": quantiles(values, field.log)})
    return made


def of_lcbench(data: Path) -> list[dict[str, Any]]:
    with np.load(data / "lcbench" / "table_17x1000x52.npz") as arrays:
        columns = {name: arrays[name] for name in arrays.files if name not in ("tasks", "metrics", "curves")}
    tasks = halved(list(lcbench(data)), "choose")
    good = [{name: values[best_rows(task)] for name, values in columns.items()} for task in tasks]
    return rows(LCBENCH, good, _LCBENCH)


def of_taskset(data: Path) -> list[dict[str, Any]]:
    files = {path.name.removesuffix(".json.gz"): path for path in (data / "taskset").glob("*.json.gz")}
    good: list[Mapping[str, np.ndarray]] = []
    for task in halved(list(taskset(data)), "choose"):
        trials = json.loads(gzip.decompress(files[task.name].read_bytes()))
        best = best_rows(task)
        good.append({name: np.array([trials[k]["hp"][name] for k in best]) for name in trials[0]["hp"]})
    return rows(TASKSET, good, _TASKSET)


def regret(table: Table, seed: int, like: np.ndarray | None, strength: float) -> list[float]:
    """Returns the regret after each of TRIALS whole curves at random, a share `strength` of each dimension's draws by
    the quantiles `like` (shares x dimensions)."""
    random, free = np.random.default_rng(seed), np.ones(len(table.cube), dtype=bool)
    losses = np.nanmin(np.where(np.isnan(table.curves), np.inf, table.curves), axis=1)
    seen, regrets = math.inf, list[float]()
    for count in range(1, TRIALS[-1] + 1):
        point, drawn = random.random(table.dimensions), random.random(table.dimensions) < strength
        if like is not None:
            shares = np.linspace(0.0, 1.0, len(like))
            point = np.array(
                [np.interp(x, shares, like[:, k]) if drawn[k] else x for k, x in enumerate(point)], dtype=float
            )
        distance = np.where(free, ((table.cube - point) ** 2).sum(axis=1), np.inf)
        row = int(distance.argmin())
        free[row] = False
        seen = min(seen, float(losses[row]))
        if count in TRIALS:
            regrets.append(table.regret(seen))
    return regrets


def print_regrets(data: Path) -> None:
    """Prints the mean regret on the tasks of the other half, uniform and by densities of the half for choosing."""
    counts = ", ".join(map(str, TRIALS))
    print(f"| regret after {counts} curves | uniform | strength 0.5 | strength 0.8 |")
    print("|---|---|---|---|")
    for name, load in SETS.items():
        tasks = list(load(data))
        good = np.concatenate([task.cube[best_rows(task)] for task in halved(tasks, "choose")])
        like = np.quantile(good, np.linspace(0.0, 1.0, QUANTILES), axis=0)
        cells: list[str] = []
        for strength in (0.0, 0.5, 0.8):
            each = [regret(t, seed, like, strength) for t in halved(tasks, "report") for seed in range(SEEDS)]
            cells.append(" / ".join(f"{x:.3f}" for x in np.mean(each, axis=0)))
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--regret", action="store_true")
    options = parser.parse_args()
    if options.regret:
        print_regrets(options.data)
        return
    made = {"made_by": "bench/densities.py", "densities": [*of_lcbench(options.data), *of_taskset(options.data)]}
    TO.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
