"""How much densities of good values help a search, a field each: real learning curves replayed.

    python bench/default_densities.py --tables DIR [--half choose|report] [--seeds 10] [--sets LCBench,TaskSet]
                                      [--after 4,10] [--fields NAME,...] [--strength 0.5]
                                      [--sampler auto|random] [--cache FILE]

The search is the default of `bench/search.py`; with `--sampler random` it draws whole curves at random, which takes
seconds. On the half for the report the dimension of a field follows what ships, which
the other half gave; on the half for choosing, the density of that half's other tasks. `all` are all fields of a set,
and `wrong` is the learning rate by the other set's density, which is for another optimizer and other models. Printed
are the mean regrets after so many whole curves and their ratio to the default without densities, cells paired, with a
95 % interval by bootstrap over whole seeds, since the tasks of LCBench share the configurations that a seed draws.

Each cell that has ended is a line of --cache and is not run again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import warnings
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import cast

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.cells import Cells
from bench.densities import LCBENCH, QUANTILES, TASKSET, Field, best_rows
from bench.machine import machine
from bench.search import ratio
from bench.searchers import Ours
from bench.tables import HALVES, SETS, Table, halved, replay
from hpo.space.densities import Density, densities

FIELDS: Mapping[str, Mapping[str, Field]] = {"LCBench": LCBENCH, "TaskSet": TASKSET}
WRONG = {"LCBench": "lr/adam", "TaskSet": "lr/sgd"}


@cache
def tables(directory: Path, kind: str) -> list[Table]:
    return list(SETS[kind](directory))


@cache
def columns(directory: Path, kind: str) -> dict[str, np.ndarray]:
    """Returns the values of a set's hyperparameters by name, in the order of the cube's axes."""
    if kind == "LCBench":
        with np.load(directory / "lcbench" / "table_17x1000x52.npz") as arrays:
            return {name: arrays[name] for name in arrays.files if name not in ("tasks", "metrics", "curves")}
    file = min((directory / "taskset").glob("*.json.gz"))
    rows = json.loads(gzip.decompress(file.read_bytes()))
    return {name: np.array([row["hp"][name] for row in rows]) for name in rows[0]["hp"]}


def shipped(values: np.ndarray, name: str) -> np.ndarray:
    """Returns the quantiles of a shipped density on the axis of a hyperparameter's values."""
    density = densities()[name]
    points, low, high = np.array(density.quantiles), values.min(), values.max()
    points, low, high = (np.log(x) if density.log else x for x in (points, low, high))
    return (points - low) / (high - low)


def of_others(chosen: list[Table], task: Table, axis: int) -> np.ndarray:
    """Returns the quantiles of the good values of all tasks but one."""
    good = np.concatenate([other.cube[best_rows(other), axis] for other in chosen if other is not task])
    return np.quantile(good, np.linspace(0.0, 1.0, QUANTILES)) + 1e-6 * np.arange(QUANTILES)


def followed(given: argparse.Namespace, kind: str, case: str, task: Table) -> dict[int, str]:
    """Returns, by axis, the names of the densities of a case, which it adds to those that ship."""
    values, fields = columns(given.tables, kind), FIELDS[kind]
    axes = {name: list(values).index(field.column) for name, field in fields.items()}
    chosen = halved(tables(given.tables, kind), "choose")
    likes: dict[int, np.ndarray] = {}
    if case == "wrong":
        axis = list(values).index("learning_rate")
        likes[axis] = shipped(values["learning_rate"], WRONG[kind])
    for name in fields if case == "all" else {case} & fields.keys():
        axis, column = axes[name], values[fields[name].column]
        likes[axis] = shipped(column, name) if given.half == "report" else of_others(chosen, task, axis)
    known = cast("dict[str, Density]", densities())
    for axis, points in likes.items():
        known[f"axis {axis}"] = Density(log=False, quantiles=tuple(points.tolist()), source="")
    return {axis: f"axis {axis}" for axis in likes}


def regrets(given: argparse.Namespace, kind: str, case: str, task: Table, seed: int) -> list[float]:
    """Returns the regret after each count of whole curves."""
    search = ("random", "none", None) if given.sampler == "random" else ("auto", None, 4)
    sampler, strategy, window = search
    likes = followed(given, kind, case, task)
    method = Ours(sampler, strategy, task.dimensions, seed, window, likes=likes, strength=given.strength)
    return replay(task, method, 1, given.after)


def cells(given: argparse.Namespace, kind: str, case: str, known: Cells) -> np.ndarray:
    """Returns the regrets of each seed and task."""
    rows: list[list[float]] = []
    for seed in range(given.seeds):
        for task in halved(tables(given.tables, kind), given.half):
            key = f"{kind}, {case}, {task.name}, {seed}, {given.half}, {given.strength}, {given.after}, {given.sampler}"
            rows.append(known.get(key, partial(regrets, given, kind, case, task, seed)))
    return np.array(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True)
    parser.add_argument("--half", choices=HALVES, default="report")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--after", default="4,10", help="whole curves")
    parser.add_argument("--fields", help="of a set, all or wrong; by default each, and all and wrong")
    parser.add_argument("--strength", type=float, default=0.5)
    parser.add_argument("--sampler", choices=("auto", "random"), default="auto")
    parser.add_argument("--cache", type=Path, help="of the cells that have ended, JSON lines")
    given = parser.parse_args()
    given.after = [int(count) for count in given.after.split(",")]
    warnings.simplefilter("ignore")
    print(f"{machine()}; seeds 0 to {given.seeds - 1}, {given.half}, strength {given.strength}")
    known = Cells(given.cache)
    for kind in given.sets.split(","):
        cases = [*FIELDS[kind], "all", "wrong"]
        if given.fields:
            cases = [case for case in given.fields.split(",") if case in cases]
        base = cells(given, kind, "nothing", known)
        groups = np.repeat(np.arange(given.seeds), len(base) // given.seeds).tolist()
        print(f"{kind}: regret after {given.after} curves; over that without\n  nothing {base.mean(axis=0).round(4)}")
        for case in cases:
            of_case = cells(given, kind, case, known)
            print(f"  {case:18} {of_case.mean(axis=0).round(4)}   {ratio(of_case, base, groups)}", flush=True)


if __name__ == "__main__":
    main()
