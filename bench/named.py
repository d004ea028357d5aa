"""What a search names as its best, beside the same epochs spent on whole trials, by studies of a few trials.

    python bench/named.py [--studies 500] [--tables DIR] [--select best] [--sampler random] [--finish none]
                          [--strategy asha] [--epochs 5,9] [--trials 2,3,4]

Each study has some epochs a trial, some trials and some noise; a class is a combination of these. The default searches
and its end phase trains stopped trials to their end; `none` trains as many epochs, rounded up to whole trials. Regret
is how far the configuration that is named lies from the best that could have been drawn, without the noise. Printed for
each class are both means, their ratio, and in how many studies a stopped trial stands better than what is named.

Without --tables the curves are made: a floor and a speed that depend on two parameters, overfitting for some. With it
they are those of LCBench and TaskSet (`bench/tables.py`), of which a study takes as many epochs, evenly spread.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import machine
from bench.searchers import Ours
from bench.tables import OBJECTIVE, SETS, Table, end_phase, halved
from hpo.search.finishing import ahead
from hpo.search.strategies.registry import DEFAULT, complete

EPOCHS, TRIALS, NOISES = (5, 9, 18, 36), (6, 12, 25, 50), (0.0, 0.1, 0.3)
Curve = Sequence[float]
Select = Literal["last", "best"]
CurveOf = Callable[[Sequence[float], int], tuple[Curve, float]]  # (point, number) -> losses, and the regret of the end


@dataclass(frozen=True)
class Named:
    """What a study has named, and the epochs that it has trained."""

    regret: float
    epochs: int
    ahead: int  # stopped trials that stand better than what is named


def judged(curve: Curve, select: Select) -> float:
    """Returns the loss by which a trial with this curve is judged."""
    return curve[-1] if select == "last" else min(curve)


def search(of: CurveOf, epochs: int, trials: int, ours: Ours, select: Select, *, finish: bool) -> Named:
    """Returns what a study of so many trials names."""
    whole: dict[int, Curve] = {}
    regrets: dict[int, float] = {}
    complete: dict[int, list[float]] = {}
    stopped: dict[int, list[float]] = {}
    spent = 0
    for _ in range(trials):
        asked = ours.next()
        assert asked is not None and asked[1] is not None
        number, point = asked[0], [*asked[1]]
        whole[number], regrets[number] = of(point, number)
        for epoch, loss in enumerate(whole[number], 1):
            spent += 1
            if not ours.report(number, epoch, loss, epoch == epochs):
                ended = complete if epoch == epochs else stopped
                ended[number] = [judged(whole[number][:epoch], select)]
                break
    phase = end_phase(complete, stopped, lambda n: judged(whole[n], select), epochs, spent) if finish else 0
    best = min(complete, key=lambda number: (complete[number], number))
    return Named(regrets[best], spent + phase, len(ahead([OBJECTIVE], complete, stopped)))


def made(seed: int, epochs: int, noise: float, select: Select) -> CurveOf:
    """Returns the curves of a study that is made at random: in some the fast configurations are those that end well, in
    others those that end badly or overfit."""
    draws = np.random.default_rng([seed, 1])
    best, power, speed = draws.uniform(0.1, 0.9, 2), draws.uniform(0.7, 2.0), draws.uniform(1.0, 8.0)
    slope, start, over = draws.uniform(-2.0, 2.0), draws.uniform(0.5, 3.0), draws.uniform(0.0, 0.5)
    steps = np.arange(1, epochs + 1) / epochs

    def floor(point: np.ndarray) -> float:
        return float(np.mean(np.abs(point - best) ** power))

    def curve(point: Sequence[float], number: int) -> tuple[Curve, float]:
        at = np.asarray(point)
        rate = speed * math.exp(slope * (2 * at[0] - 1))
        clean = floor(at) + start * np.exp(-rate * steps) + over * at[1] * np.maximum(steps - 0.3, 0)
        noisy = clean + noise * np.random.default_rng([seed, 2, number]).normal(size=epochs)
        return noisy.tolist(), judged(clean.tolist(), select) - least

    grid = np.stack(np.meshgrid(*[np.linspace(0, 1, 21)] * 2), axis=-1).reshape(-1, 2)
    least = 0.0
    least = min(curve(point.tolist(), 0)[1] for point in grid)
    return curve


def replayed(table: Table, epochs: int, select: Select) -> CurveOf:
    """Returns the curves of a table, of which so many epochs are kept, evenly spread, by the nearest configuration."""
    kept = np.linspace(0, table.length - 1, epochs).round().astype(int)
    curves = np.where(np.isnan(table.curves[:, kept]), np.inf, table.curves[:, kept])
    ends = curves[:, -1] if select == "last" else curves.min(axis=1)
    least, median = ends.min(), np.median(ends)

    def curve(point: Sequence[float], number: int) -> tuple[Curve, float]:
        row = int(np.argmin(((table.cube - np.asarray(point)) ** 2).sum(axis=1)))
        return curves[row].tolist(), float(min((ends[row] - least) / (median - least), 100.0))

    return curve


def pair(
    of: CurveOf, dimensions: int, seed: int, epochs: int, trials: int, select: Select, given: argparse.Namespace
) -> tuple[Named, Named]:
    """Returns what the default names and what as many epochs of whole trials do."""

    def ours(strategy: Mapping[str, object]) -> Ours:
        return Ours(given.sampler, complete(strategy, epochs), dimensions, seed, 4, select)

    first = search(of, epochs, trials, ours(given.strategy), select, finish=given.finish == "auto")
    count = math.ceil(first.epochs / epochs)
    return first, search(of, epochs, count, ours({"name": "none"}), select, finish=False)


@cache
def loaded(directory: Path, kind: str) -> list[Table]:
    return list(SETS[kind](directory))


def classes(given: argparse.Namespace) -> Iterator[tuple[tuple[object, ...], list[tuple[Named, Named]]]]:
    """Yields each class with its studies."""
    if given.tables:
        for kind, (epochs, trials) in product(SETS, product(given.epochs, given.trials)):
            tasks = halved(loaded(given.tables, kind), given.half)
            cells = [
                pair(replayed(task, epochs, given.select), task.dimensions, seed, epochs, trials, given.select, given)
                for task in tasks
                for seed in range(max(given.studies // len(tasks), 1))
            ]
            yield (kind, epochs, trials), cells
        return
    each = max(given.studies // (len(given.epochs) * len(given.trials) * len(NOISES)), 1)
    for place, ((epochs, trials), noise) in enumerate(product(product(given.epochs, given.trials), NOISES)):
        seeds = range(place * each, (place + 1) * each)
        yield (
            (epochs, trials, noise),
            [
                pair(made(seed, epochs, noise, given.select), 2, seed, epochs, trials, given.select, given)
                for seed in seeds
            ],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=500, help="in all; of tables in each class")
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--half", choices=("choose", "report"))
    parser.add_argument("--sampler", default="random")
    parser.add_argument("--select", choices=("best", "last"), default="last")
    parser.add_argument("--finish", choices=("auto", "none"), default="auto")
    parser.add_argument("--strategy", type=lambda name: {"name": name}, default=DEFAULT)
    for name, values in (("--epochs", EPOCHS), ("--trials", TRIALS)):
        parser.add_argument(name, type=lambda text: [int(part) for part in text.split(",")], default=values)
    given = parser.parse_args()
    print(f"{machine()}; {given.sampler}, judged by the {given.select} epoch, --finish {given.finish}")
    for name, cells in classes(given):
        ours, none = (np.array([cell[side].regret for cell in cells]) for side in (0, 1))
        behind, spent = sum(cell[0].ahead > 0 for cell in cells), np.mean([cell[0].epochs for cell in cells])
        ratio = ours.mean() / none.mean() if none.mean() else math.nan
        print(
            f"  {' '.join(f'{part!s:>8}' for part in name)}  {ours.mean():.4f} {none.mean():.4f}  ratio {ratio:.2f}"
            f"  {behind:3d} of {len(cells)} behind a stopped one  {spent:.0f} epochs",
            flush=True,
        )


if __name__ == "__main__":
    main()
