"""How good a search is at a budget: real learning curves replayed in simulated time, ours beside the peers.

    python bench/search.py --tables DIR [--half choose|report] [--seeds 3] [--workers 1] [--methods NAME,...]
                           [--cache FILE] [--jobs 2] [--tasks N]

DIR holds lcbench/table_17x1000x52.npz and taskset/*.json.gz; the protocol is that of `bench/tables.py`. Printed are the
regrets after as many points as 10 and 30 whole curves have, as the mean over tasks and seeds with its standard error,
then the same of the trial that would be named: the best complete one, and of ours once the best of the others have been
trained to their end beyond the budget, nan where a cell names none; with --against NAME, the ratio of the means paired
by task and seed, with a 95 % interval by bootstrap, and how many curves' worth of points it takes to the mean regret
that NAME has at each budget; then the processor time of a cell, and of each decision which trial is to run. Last comes
the default's ratio to the best peer, the one to which it is greatest, at each budget.

Without --methods it runs the default, freeze-thaw, random search and what Optuna has: some half an hour of one core for
three seeds. Every cell (method, task, seed) that has ended is a line of --cache and is not run again, so that a run can
be cut and goes on; delete the lines of what has changed. Only methods that have a cell get a row.

The other peers (`bench/peers.py`) run where their library is installed: the same command with `--methods NAME,...` in
an environment with it, numpy and the same cache, then here with `--methods cached`:

    syne-tune        syne-tune==0.16.0; scikit-learn and xgboost for BORE and CQR, huggingface_hub and s3fs for CQR
    smac             smac==2.4.1
    neps             neural-pipeline-search==0.17.0 torch==2.13.0
    hebo             HEBO==0.3.6 optuna==5.0.0 torch==2.13.0 numpy==1.24.4 scipy==1.11.4 pandas==2.0.3
                     scikit-learn==1.3.2 gpytorch==1.14 GPy==1.13.2 catboost==1.2.5 matplotlib==3.8.4
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import machine
from bench.peers import is_peer
from bench.searchers import methods
from bench.tables import BUDGETS, HALVES, SETS, Method, Table, halved, replayed

Key = tuple[str, str, int, int]  # method, task, seed, workers
Cells = dict[Key, dict[str, Any]]
Rows = dict[tuple[str, int], dict[str, Any]]  # of one method, by task and seed
FEWEST = 5  # seeds that a peer has, to be called the best
COMPARED = ("the default", "freeze-thaw", "random", "random + asha", "optuna random + halving",
            "optuna tpe + hyperband", "optuna tpe + median")  # fmt: skip


@dataclass(frozen=True)
class Cell:
    directory: Path
    kind: str
    task: str
    method: str
    seed: int
    workers: int

    @property
    def key(self) -> Key:
        return (self.method, self.task, self.seed, self.workers)


@cache
def tables(directory: Path, kind: str) -> list[Table]:
    return list(SETS[kind](directory))


def run(cell: Cell) -> tuple[Key, dict[str, Any]]:
    """The regrets of one cell at each budget, of what it has seen and of what it would name; the seconds of processor
    time, and how often a trial was asked for."""
    warnings.simplefilter("ignore")
    table = next(table for table in tables(cell.directory, cell.kind) if table.name == cell.task)
    begun = time.process_time()
    method = Counted(methods(table.dimensions, table.length, cell.seed, cell.workers)[cell.method]())
    finish = not is_peer(cell.method)
    both = replayed(table, method, cell.workers, range(1, BUDGETS[-1] + 1), finish=finish)
    after, named = ([round(pair[which], 5) for pair in both] for which in (0, 1))
    seconds = round(time.process_time() - begun, 3)
    regrets = [both[budget - 1][0] for budget in BUDGETS]
    costs = {"seconds": seconds, "decisions": method.decisions}
    return cell.key, {"regret": regrets, **costs, "after": after, "named": named}


class Counted:
    """A method, and how often it was asked for a trial to run."""

    def __init__(self, method: Method) -> None:
        self._method, self.decisions = method, 0
        self.report = method.report

    def next(self) -> tuple[int, Sequence[float] | None] | None:
        self.decisions += 1
        return self._method.next()


def known(path: Path | None) -> Cells:
    if path is None or not path.exists():
        return {}
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return {(row["method"], row["task"], row["seed"], row["workers"]): row for row in rows}


def fill(cells: Iterable[Cell], found: Cells, path: Path | None, jobs: int) -> Iterator[Key]:
    """Run what is not known, in `jobs` processes, and add it to `found` and to the cache."""
    missing = [cell for cell in cells if cell.key not in found]
    with ProcessPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(run, cell) for cell in missing]):
            key, row = done.result()
            found[key] = row
            if path is not None:
                named = dict(zip(("method", "task", "seed", "workers"), key, strict=True))
                with path.open("a") as lines:
                    lines.write(json.dumps(named | row) + "\n")
            yield key


def shown(regrets: np.ndarray) -> str:
    """Of (cells, budgets): each budget's mean with its standard error."""
    error = regrets.std(axis=0, ddof=1) / len(regrets) ** 0.5 if len(regrets) > 1 else np.full(len(BUDGETS), np.nan)
    return "   ".join(f"{mean:.4f} ± {half:.4f}" for mean, half in zip(regrets.mean(axis=0), error, strict=True))


def ratio(ours: np.ndarray, theirs: np.ndarray, groups: Sequence[int] | None = None, rounds: int = 4000) -> str:
    """The ratio of the means of (cells, budgets), cells paired, with a bootstrap's 95 % interval for each budget.

    groups   of each cell, where whole groups are drawn instead of cells
    """
    kinds, of = np.unique(np.arange(len(ours)) if groups is None else groups, return_inverse=True)
    drawn = np.random.default_rng(0).integers(len(kinds), size=(rounds, len(kinds)))
    times = np.stack([np.bincount(row, minlength=len(kinds)) for row in drawn])[:, of]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (times @ ours) / (times @ theirs)
        means = ours.mean(axis=0) / theirs.mean(axis=0)
    low, high = np.nanpercentile(ratios, [2.5, 97.5], axis=0)
    return "   ".join(f"{m:.2f} [{a:.2f}, {b:.2f}]" for m, a, b in zip(means, low, high, strict=True))


def until(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Of mean regrets after 1, 2, 3 ... curves: how many of `ours` it takes to what `theirs` are at each budget."""
    found = []
    for budget in BUDGETS:
        reached = np.flatnonzero(ours <= theirs[budget - 1])
        found.append(f"{reached[0] + 1}" if len(reached) else f"over {BUDGETS[-1]}")
    return " and ".join(found) + " curves"


def cells_of(name: str, chosen: Sequence[Table], found: Cells, given: argparse.Namespace) -> Rows:
    """What there is of a method."""
    keys = {(table.name, seed): (name, table.name, seed, given.workers) for table in chosen for seed in given.seeds}
    return {key: found[whole] for key, whole in keys.items() if whole in found}


def versus(chosen: Sequence[Table], found: Cells, given: argparse.Namespace) -> None:
    """The default's ratio to the best of the peers that have FEWEST seeds on every task, and to it on each half.

    The best is the one to which the ratio is greatest: means of other seeds do not compare. The second interval is of
    whole seeds, which share their first draws among the tasks of a set.
    """
    ours = cells_of("the default", chosen, found, given)
    enough = min(FEWEST, len(given.seeds)) * len(chosen)
    peers = {name: cells_of(name, chosen, found, given) for name in methods(1, 1, 0) if is_peer(name)}
    pairs = {name: paired(ours, cells) for name, cells in peers.items() if len(ours.keys() & cells.keys()) >= enough}
    for column, budget in enumerate(BUDGETS if pairs else ()):
        best = max(pairs, key=lambda name: np.divide(*pairs[name].mean(axis=1))[column])
        for half in (given.half,) if given.half else (None, *HALVES):
            tasks = {table.name for table in (chosen if half == given.half else halved(chosen, half))}
            here = {key: row for key, row in ours.items() if key[0] in tasks}
            means = paired(here, peers[best])[:, :, [column]]
            seeds = [seed for _, seed in sorted(here.keys() & peers[best].keys())]
            drawn = f"{ratio(*means)}, by seeds {ratio(*means, groups=seeds).split(' ', 1)[1]}"
            print(f"  after {budget}, the default over {best}, {half or 'all'}: {drawn}, of {len(seeds)} cells")


def paired(ours: Rows, theirs: Rows) -> np.ndarray:
    """Regrets (2, cells, budgets) of the tasks and seeds that both have."""
    return np.array([[rows[key]["regret"] for key in sorted(ours.keys() & theirs.keys())] for rows in (ours, theirs)])


def report(chosen: Sequence[Table], names: Sequence[str], found: Cells, given: argparse.Namespace) -> None:
    """The table of one set: what there is of every method."""
    other = cells_of(given.against, chosen, found, given) if given.against else {}
    for name in names:
        cells = cells_of(name, chosen, found, given)
        if not cells:
            continue
        regrets = np.array([row["regret"] for row in cells.values()])
        seconds = np.mean([row["seconds"] for row in cells.values()])
        decisions = np.mean([row.get("decisions", np.nan) for row in cells.values()])
        both = sorted(cells.keys() & other.keys()) if name != given.against else []
        known = [key for key in both if "after" in cells[key] and "after" in other[key]]
        means = (np.mean([rows[key]["after"] for key in known], axis=0) for rows in (cells, other)) if known else ()
        ends = [[row["named"][budget - 1] for budget in BUDGETS] for row in cells.values() if "named" in row]
        costs = f"{seconds:6.2f} s {1e3 * seconds / decisions:5.1f} ms"
        print(
            f"  {name:28} {shown(regrets)}   {len(cells):4d} cells {costs}",
            f"  named {shown(np.array(ends))}" if ends else "",
            f"  ratio {ratio(*paired(cells, other))}" if both else "",
            f"  {until(*means)}" if known else "",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True)
    parser.add_argument("--half", choices=HALVES, help="of each set's tasks; by default all")
    parser.add_argument("--seeds", default="3", help="so many from 0, or first:last")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--sets", default="LCBench,TaskSet", help=f"of {', '.join(SETS)}")
    parser.add_argument("--tasks", type=int, help="the first so many of each set")
    parser.add_argument(
        "--methods", default=",".join(COMPARED), help="by name; cached: what the cache has, nothing run"
    )
    parser.add_argument("--against", help="the method to be paired with")
    parser.add_argument("--cache", type=Path, help="of the cells that have ended, JSON lines")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    cached = given.methods == "cached"
    names = list(methods(1, 1, 0)) if cached else given.methods.split(",")
    if unknown := [name for name in names if name not in methods(1, 1, 0)]:
        parser.error(f"--methods {unknown[0]!r}: give cached, or some of {', '.join(methods(1, 1, 0))}")
    if unknown := [kind for kind in given.sets.split(",") if kind not in SETS]:
        parser.error(f"--sets {unknown[0]!r}: give some of {', '.join(SETS)}")
    if cached and given.cache is None:
        parser.error("--methods cached needs --cache FILE")
    first, _, last = given.seeds.rpartition(":")
    given.seeds = range(int(first or 0), int(last))
    print(f"{machine()}; {given.workers} workers, seeds {given.seeds}, {given.half or 'both halves'}")
    found = known(given.cache)
    if cached and not found:
        parser.error(f"--methods cached: {given.cache} has no cell; leave --methods out to run those that are compared")
    for kind in given.sets.split(","):
        chosen = halved(tables(given.tables, kind), given.half)[: given.tasks]
        if not cached:
            cells = [
                Cell(given.tables, kind, table.name, name, seed, given.workers)
                for seed in given.seeds
                for name in names
                for table in chosen
            ]
            for _ in fill(cells, found, given.cache, given.jobs):
                pass
        print(f"{kind}: {len(chosen)} tasks; regret after {BUDGETS[0]} and {BUDGETS[1]} curves")
        report(chosen, names, found, given)
        versus(chosen, found, given)


if __name__ == "__main__":
    main()
