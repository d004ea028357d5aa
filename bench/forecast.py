"""How well a forecast holds, and what a rule that stops by it costs, on replayed studies.

    python bench/forecast.py [--tables DIR] [--half choose|report] [--seeds 2] [--trials 120] [--cache FILE]
                             [--terminator]

Studies of LCBench and TaskSet (`bench/tables.py`, below --tables) are searched by the default and without pruning, and
80 made ones a seed by random search (`bench/named.py`). After n trials the gain of the next m is held against what
`hpo.search.forecast` says. Printed for each class of studies are the share whose gain is at most `Forecast.most`, which
is to be COVERED, in all and by n and by m, the gain as a share of the expected one, and what MEAN and MOST would fit
these studies best: the mean of the classes' ratios of sums, and the quantile of all ratios, each class as much as the
others.

Then the rule that ends a study at a gain below some share of the distance from the median to the best is held against
patience, a fixed number of trials and, with --terminator, Optuna's regret bound: each by the threshold with which it
spends as many epochs. Regret is that distance's share; `lost` is by how much it is higher than after all trials. Each
study is a line of --cache and is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import machine
from bench.named import CurveOf, judged, made, replayed
from bench.searchers import Ours
from bench.tables import HALVES, SETS, halved
from hpo.search.forecast import COVERED, HORIZON, MEAN, MOST, Seen, forecast
from hpo.search.strategies.registry import DEFAULT, complete

AFTER, MORE = (10, 15, 20, 30, 40, 60, 80), (5, 10, 20, 40, 60)
MADE, MADE_EPOCHS, NOISES = 80, (9, 18, 36), (0.0, 0.1, 0.3)
SHARES = (0.005, 0.01, 0.02, 0.05)  # of the distance from the median to the best: gains below which the rule stops


@dataclass(frozen=True)
class Study:
    """A study that has ended: of each trial its epochs, its loss where finite, whether it is complete, its point in
    the cube, and the regret of its configuration. `unit` is the distance from the median to the best."""

    kind: str
    task: str
    strategy: str
    seed: int
    unit: float
    epochs: Sequence[int]
    losses: Sequence[float | None]
    complete: Sequence[bool]
    points: Sequence[Sequence[float]]

    @property
    def seen(self) -> list[Seen]:
        pairs = zip(self.losses, self.complete, strict=True)
        return [Seen(math.inf if loss is None else loss, complete) for loss, complete in pairs]

    @property
    def best(self) -> np.ndarray:
        """The best loss of a complete trial after each trial; infinite before the first."""
        return np.minimum.accumulate([trial.loss if trial.complete else math.inf for trial in self.seen])


def search(of: CurveOf, ours: Ours, epochs: int, trials: int, select: str) -> dict[str, list]:
    """Returns what the trials of a study were, in their order."""
    rows: dict[str, list] = {"epochs": [], "losses": [], "complete": [], "points": []}
    for _ in range(trials):
        asked = ours.next()
        assert asked is not None and asked[1] is not None
        number, point = asked[0], [*asked[1]]
        whole, _ = of(point, number)
        length = next(at for at, loss in enumerate(whole, 1) if not ours.report(number, at, loss, at == epochs))
        loss = judged(whole[:length], select)  # pyright: ignore[reportArgumentType]
        rows["epochs"].append(length)
        rows["losses"].append(loss if math.isfinite(loss) else None)
        rows["complete"].append(length == epochs and math.isfinite(loss))
        rows["points"].append([round(part, 4) for part in point])
    return rows


def tasks(given: argparse.Namespace, seed: int) -> Iterator[tuple[str, str, CurveOf, int, int, str, float]]:
    """Yields (set, task, curves, dimensions, epochs, judged by, unit) of the studies of one seed."""
    if given.tables:
        for kind, read in SETS.items():
            for table in halved(list(read(given.tables)), given.half):
                unit = table.median - table.best
                yield (
                    kind,
                    table.name,
                    replayed(table, table.length, "best"),
                    table.dimensions,
                    table.length,
                    "best",
                    unit,
                )
    first = (2 * seed + HALVES.index(given.half)) * MADE
    for place in range(first, first + MADE):
        epochs, noise = MADE_EPOCHS[place % 3], NOISES[place // 3 % 3]
        of = made(place, epochs, noise, "last")
        ends = [of(point, 0)[1] for point in np.random.default_rng(place).random((200, 2)).tolist()]
        yield "made", f"made {place}", of, 2, epochs, "last", float(np.median(ends))


def studies(given: argparse.Namespace) -> Iterator[Study]:
    """Yields all studies, out of the cache where they are in it."""
    lines = given.cache.read_text().splitlines() if given.cache and given.cache.exists() else []
    known = [Study(**json.loads(line)) for line in lines]
    by_key = {(study.task, study.strategy, study.seed): study for study in known}
    for seed in range(given.seeds):
        for kind, task, of, dimensions, epochs, select, unit in tasks(given, seed):
            for strategy in ("default", "none"):
                study = by_key.get((task, strategy, seed))
                if study is None:
                    sampler = "random" if kind == "made" else "auto"
                    rules = complete(DEFAULT if strategy == "default" else {"name": "none"}, epochs)
                    ours = Ours(sampler, rules, dimensions, seed, 4, select)  # pyright: ignore[reportArgumentType]
                    study = Study(kind, task, strategy, seed, unit, **search(of, ours, epochs, given.trials, select))
                    if given.cache:
                        with given.cache.open("a") as file:
                            file.write(json.dumps(asdict(study)) + "\n")
                yield study


def print_coverage(of: Sequence[Study]) -> None:
    """Prints how often the bound holds, by class, and the constants that would fit."""
    print(f"  share of gains below the bound ({COVERED:g} expected); gain as a share of the expected one")
    ratios, sums = list[tuple[float, float]](), list[float]()
    for kind, strategy in sorted({(study.kind, study.strategy) for study in of}):
        cells = list[tuple[int, int, float, float]]()  # n, m, gain, base
        for study in of:
            if (study.kind, study.strategy) == (kind, strategy):
                seen, best = study.seen, study.best
                for n in AFTER:
                    for m in (m for m in MORE if n + m <= len(seen)):
                        if (expected := forecast(seen[:n], m)) is not None:
                            cells.append((n, m, best[n - 1] - best[n + m - 1], expected.most / MOST))
        n, m, gain, base = np.array(cells).T
        held = gain <= MOST * base + 1e-12
        shares = (
            " ".join(f"{held[n == at].mean():.2f}" for at in AFTER),
            " ".join(f"{held[m == at].mean():.2f}" for at in MORE),
        )
        sums.append(gain.sum() / base.sum())
        ratios += [(ratio, 1 / len(gain)) for ratio in gain[base > 0] / base[base > 0]]
        print(f"  {kind:8} {strategy:8} {len(gain):5d}  {held.mean():.3f}  {sums[-1] / MEAN:.2f}")
        print(f"    by n {shares[0]}  by m {shares[1]}")
    ratio, weight = np.array(sorted(ratios)).T
    most = ratio[np.searchsorted(np.cumsum(weight) / weight.sum(), COVERED)]
    print(f"  these studies have MEAN {np.mean(sums):.2f}, MOST {most:.2f}; it is {MEAN:g} and {MOST:g}")


Rule = Callable[[Study], int]  # after how many trials a study stops


def by_gain(share: float) -> Rule:
    def stop(study: Study) -> int:
        seen = study.seen
        ends = (n for n in range(1, len(seen)) if (at := forecast(seen[:n], HORIZON)) and at.gain < share * study.unit)
        return next(ends, len(seen))

    return stop


def by_patience(trials: int) -> Rule:
    def stop(study: Study) -> int:
        best = study.best
        ends = (n for n in range(trials + 1, len(best)) if best[n - 1] == best[n - 1 - trials] < math.inf)
        return next(ends, len(best))

    return stop


def by_count(trials: int) -> Rule:
    return lambda study: min(trials, len(study.epochs))


def terminated(studies: Sequence[Study]) -> Callable[[float], Rule]:
    """Returns Optuna's rule by its bound: the regret bound after every tenth trial is reckoned once."""
    import optuna
    from optuna.terminator import RegretBoundEvaluator

    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    bounds: dict[tuple[str, str, int], dict[int, float]] = {}
    for study in studies:
        space: dict[str, optuna.distributions.BaseDistribution] = {
            f"x{i}": optuna.distributions.FloatDistribution(0.0, 1.0) for i in range(len(study.points[0]))
        }
        ended = [
            optuna.trial.create_trial(value=loss, params=dict(zip(space, point, strict=True)), distributions=space)
            for point, loss, complete in zip(study.points, study.losses, study.complete, strict=True)
            if complete
        ]
        places = np.cumsum(study.complete)
        evaluator = RegretBoundEvaluator(seed=0)
        bounds[study.task, study.strategy, study.seed] = {
            n: evaluator.evaluate(ended[: places[n - 1]], optuna.study.StudyDirection.MINIMIZE)
            for n in range(20, len(study.epochs), 10)
            if places[n - 1] >= 5
        }

    def rule(share: float) -> Rule:
        def stop(study: Study) -> int:
            known = bounds[study.task, study.strategy, study.seed]
            return next((n for n, bound in known.items() if bound < share * study.unit), len(study.epochs))

        return stop

    return rule


def print_rules(of: Sequence[Study], terminator: bool) -> None:
    """Prints what each rule spends and loses, the others by the threshold that spends nearest to what ours does."""
    print("  the rule of a gain, beside others that spend as much")

    def cost(rule: Rule) -> tuple[float, float]:
        spent, lost = [], []
        for study in of:
            n, best = rule(study), study.best
            spent.append(sum(study.epochs[:n]) / sum(study.epochs))
            lost.append(min((best[n - 1] - best[-1]) / study.unit, 10.0))
        return float(np.mean(spent)), float(np.mean(lost))

    families: dict[str, tuple[Callable[..., Rule], Sequence[float]]] = {
        "patience": (by_patience, range(5, 110, 2)),
        "a fixed number": (by_count, range(10, 120, 2)),
    }
    if terminator:
        families["Optuna's regret bound"] = terminated(of), [*np.geomspace(0.001, 100, 60)]
    others = {name: [(*cost(family(at)), at) for at in ats] for name, (family, ats) in families.items()}
    for share in SHARES:
        ours = cost(by_gain(share))
        print(f"    {f'gain<{share:g}':22}  {ours[0]:.2f} of the epochs, lost {ours[1]:.4f}")
        for name, costs in others.items():
            spent, lost, threshold = min(costs, key=lambda row: abs(row[0] - ours[0]))
            print(f"      {name:20}  {spent:.2f} of the epochs, lost {lost:.4f}  (at {threshold:.3g})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--half", choices=HALVES, default="choose")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--trials", type=int, default=120)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--terminator", action="store_true")
    given = parser.parse_args()
    print(f"{machine()}; --half {given.half}")
    ended = list(studies(given))
    print_coverage(ended)
    for kind in sorted({study.kind for study in ended}):
        print(f"  {kind}")
        print_rules([study for study in ended if (study.kind, study.strategy) == (kind, "default")], given.terminator)


if __name__ == "__main__":
    main()
