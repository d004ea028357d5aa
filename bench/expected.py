"""How near the expected value of the best trial is to the truth, and whether its neighbours would choose a better one.

    python bench/expected.py --tables DIR [--half choose|report] [--repeats 20]

A study is 50 configurations of a table (`bench/tables.py`, below --tables), drawn at random or, `focused`, 20 so and 30
from the best quarter. The truth of a configuration is the best value of its curve, to which normal noise is added: .1,
.3 and 1 times half the distance from the median to the best. Printed for each set are the error of the best value and
of `hpo.search.expected`, in units of the noise, how often the truth is within two of them, and the regret, as a share
of the distance from the median to the best, of the best trial and of the one that a Gaussian process has first. The
process knows the noise, and its scales are those of the highest marginal likelihood.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.tables import HALVES, SETS, halved
from hpo.search.expected import expected

TRIALS, FOCUSED, NOISES = 50, 20, (0.1, 0.3, 1.0)
LENGTHS, SCALES, ROUGHNESS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2), (0.3, 1.0, 3.0), (0.0, 0.1, 0.3)


def by_neighbours(cube: np.ndarray, losses: np.ndarray, noise: float) -> int:
    """Returns the place of the lowest posterior mean; losses far above the median are clipped."""
    middle = np.median(losses)
    clipped = np.minimum(losses, 3 * middle - 2 * losses.min())
    deviation = clipped.std()
    y, own = (clipped - middle) / deviation, (noise / deviation) ** 2
    squares = ((cube[:, None] - cube[None]) ** 2).sum(-1)
    fits = []
    for length, scale, rough in product(LENGTHS, SCALES, ROUGHNESS):
        prior = scale * np.exp(-squares / (2 * length**2)) + rough * np.eye(len(y))
        whole = prior + (own + 1e-8) * np.eye(len(y))
        solved = np.linalg.solve(whole, y)
        fits.append((-0.5 * y @ solved - 0.5 * np.linalg.slogdet(whole)[1], prior @ solved))
    return int(max(fits, key=lambda fit: fit[0])[1].argmin())


def drawn(rng: np.random.Generator, truth: np.ndarray, kind: str) -> np.ndarray:
    if kind == "random":
        return rng.choice(len(truth), TRIALS, replace=False)
    best = np.argsort(truth)[: len(truth) // 4]
    return np.r_[rng.choice(len(truth), FOCUSED, replace=False), rng.choice(best, TRIALS - FOCUSED, replace=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True)
    parser.add_argument("--half", choices=HALVES, default=HALVES[0])
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    rng, rows = np.random.default_rng(0), defaultdict(list)
    for name, read in SETS.items():
        for table in halved(list(read(options.tables)), options.half):
            ends = np.nanmin(np.where(np.isnan(table.curves), np.inf, table.curves), axis=1)
            cube, truth = table.cube[np.isfinite(ends)], ends[np.isfinite(ends)]
            unit = table.median - table.best
            for kind, relative, _ in product(("random", "focused"), NOISES, range(options.repeats)):
                at, noise = drawn(rng, truth, kind), relative * unit / 2
                losses = truth[at] + noise * rng.standard_normal(TRIALS)
                best, other = losses.argmin(), by_neighbours(cube[at], losses, noise)
                errors = [(value - truth[at][best]) / noise for value in (losses[best], expected(losses, noise)[0])]
                regrets = [(truth[at][place] - truth[at].min()) / unit for place in (best, other)]
                rows[name, kind, relative].append([*errors, *regrets])
    for (name, kind, relative), cells in sorted(rows.items()):
        (luck, error, naive, other), within = np.mean(cells, axis=0), np.mean(np.abs(np.array(cells)[:, 1]) < 2)
        differences = np.diff(np.array(cells)[:, 2:], axis=1)
        sure = differences.std() / len(cells) ** 0.5
        print(f"{name} {kind} {relative}: best {luck:+.2f}, expected {error:+.2f}, within two {within:.2f};", end=" ")
        print(f"regret {naive:.3f}, by neighbours {other:.3f} ({other - naive:+.3f} ± {sure:.3f})", flush=True)


if __name__ == "__main__":
    main()
