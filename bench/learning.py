"""How much earlier studies help a search, and how much those that mislead harm it: real learning curves replayed.

    python bench/learning.py --tables DIR [--half choose|report] [--seeds 3] [--sets LCBench,TaskSet] [--tasks N]
                             [--cases NAME,...] [--cache FILE]

The default searches the tasks of one half of each set, as in `bench/search.py`; each task of the other half is an
earlier study, of so many trials drawn at random. Printed are the mean regrets after as many points as 4, 10 and 30
whole curves have, with their standard errors, and the ratio to the default that knows nothing, paired by task and seed,
with a 95 % interval by bootstrap.

    nothing     no earlier study
    60 trials   of each task of the other half; 1000 are all
    reversed    the same 60, whose losses count with the other sign: what was best is the worst
    family      60 trials of each task of the other set, whose dimensions have other meanings

Each cell that has ended is a line of --cache and is not run again. Some fifteen minutes of one core.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.cells import Cells
from bench.machine import machine
from bench.search import ratio
from bench.searchers import Earlier, Ours
from bench.tables import HALVES, SETS, Table, halved, replay

AFTER = (4, 10, 30)  # whole curves
CASES = ("nothing", "60 trials", "1000 trials", "reversed", "family")
FEW = 60


@cache
def tables(directory: Path, kind: str) -> list[Table]:
    return list(SETS[kind](directory))


def earlier(case: str, directory: Path, kind: str, half: str, seed: int) -> Earlier:
    """The earlier studies of a case: points of the cube and losses, by task."""
    if case == "nothing":
        return {}
    others = halved(tables(directory, kind), next(name for name in HALVES if name != half))
    if case == "family":
        others = tables(directory, next(name for name in SETS if name != kind))
    count = int(case.split()[0]) if case.endswith(" trials") else FEW
    width = tables(directory, kind)[0].dimensions
    return {task.name: searched(task, count, [seed, place], case, width) for place, task in enumerate(others)}


def searched(
    task: Table, count: int, seed: Sequence[int], case: str, width: int
) -> tuple[Sequence[Sequence[float]], Sequence[float]]:
    """A study that has drawn so many trials at random, each with its least loss; one without any has the worst.

    Where the cube has fewer than `width` dimensions, they come again.
    """
    least = np.where(np.isnan(task.curves), np.inf, task.curves).min(axis=1)
    least = np.where(np.isfinite(least), least, least[np.isfinite(least)].max())
    drawn = np.sort(np.random.default_rng(seed).permutation(len(least))[:count])
    cube = np.hstack([task.cube, task.cube])[drawn, :width].round(6)
    return cube.tolist(), ((-1.0 if case == "reversed" else 1.0) * least[drawn]).tolist()


def regrets(task: Table, seed: int, taught: Earlier) -> list[float]:
    """Returns the regret after each count of whole curves of `AFTER`, with these earlier studies known."""
    return replay(task, Ours("auto", None, task.dimensions, seed, 4, earlier=taught), 1, AFTER)


def cells(given: argparse.Namespace, kind: str, case: str, known: Cells) -> Iterator[list[float]]:
    """The regrets of each task and seed."""
    for seed in range(given.seeds):
        taught = earlier(case, given.tables, kind, given.half, seed)
        for task in halved(tables(given.tables, kind), given.half)[: given.tasks]:
            key = f"{kind}, {case}, {task.name}, {seed}"
            yield known.get(key, partial(regrets, task, seed, taught))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True)
    parser.add_argument("--half", choices=HALVES, default="report", help="of each set's tasks; the other half is known")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--tasks", type=int, help="the first so many of each half")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--cache", type=Path, help="of the cells that have ended, JSON lines")
    given = parser.parse_args()
    if unknown := [case for case in given.cases.split(",") if case not in CASES]:
        parser.error(f"--cases {unknown[0]!r}: give some of {', '.join(CASES)}")
    warnings.simplefilter("ignore")
    print(f"{machine()}; seeds 0 to {given.seeds - 1}, {given.half}")
    known = Cells(given.cache)
    for kind in given.sets.split(","):
        print(f"{kind}: regret after {AFTER[0]}, {AFTER[1]} and {AFTER[2]} curves; over that with nothing known")
        base = np.array(list(cells(given, kind, "nothing", known)))
        for case in given.cases.split(","):
            begun = time.process_time()
            of_case = np.array(list(cells(given, kind, case, known)))
            spread = of_case.std(axis=0, ddof=1) / len(of_case) ** 0.5 if len(of_case) > 1 else np.zeros(len(AFTER))
            shown = "   ".join(
                f"{mean:.4f} ± {half:.4f}" for mean, half in zip(of_case.mean(axis=0), spread, strict=True)
            )
            over = "" if case == "nothing" else f"   ratio {ratio(of_case, base)}"
            print(f"  {case:12} {shown}{over}   {time.process_time() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
