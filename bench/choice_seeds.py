"""Whether what a search with a confirmation under other seeds chooses holds on data that nothing was selected by.

    python bench/choice_seeds.py --study convnet --home DIR [--trials 50] [--confirm 5x3] [--searches 2] [--seeds 3]

Each search has a seed of its own; a home goes on from what it has. The default, the trial with the best value of the
search and the trial that `hpo best` names after the confirmation are then trained anew under seeds that neither the
search nor the confirmation has used, and judged by the study's held-out metric at the epoch that the objective selects.
Printed are the means over searches and seeds, and the difference from the default with its standard error over the
searches, or over the seeds of a single one. Both are trained under the same seeds, which decide the initial weights and
the order of the data.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import hpo
from bench.cells import Cells
from bench.choice import BEST_VALUE, CONFIRMED, chosen
from bench.experts import Kept
from bench.machine import machine
from studies.atft.baseline import positive
from studies.atft.results import DEFAULT
from trainer.checkpoint.store import CheckpointStore
from trainer.loop import fit

FRESH = 1000  # the first seed of the trainings that are judged


def searched(options: argparse.Namespace, seed: int) -> hpo.StudyHandle:
    """Returns a confirmed study of its own search seed."""
    start = time.perf_counter()
    study = hpo.run(
        options.study,
        name=f"{options.study}-{seed}",
        trials=options.trials,
        workers=options.workers,
        confirm=options.confirm,
        seed=seed,
        learn_from="none",
        home=options.home,
        progress=False,
    )
    print(f"search {seed}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return study


def judged(study: str, params: dict[str, Any], seed: int) -> list[float]:
    """Returns the selected value and the held-out one of a training."""
    declared = hpo.load(study)
    declared = declared.configure({**declared.hold_out, **params, "train.seed": FRESH + seed})
    config: Any = declared.config
    [objective], reporter = declared.objectives, Kept()
    task: Any = declared.task_class()
    with tempfile.TemporaryDirectory() as directory:
        fit(task(config), config.train, reporter, CheckpointStore(Path(directory), fence=1))
    sign = -1 if objective.direction == "minimize" else 1
    best = max(reporter.epochs, key=lambda epoch: sign * epoch[objective.metric])
    return [best[objective.metric], best[objective.metric.replace("val/", "test/")]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", required=True)
    parser.add_argument("--home", type=Path, required=True, help="of the searches, and of the values of trainings")
    parser.add_argument("--trials", type=positive, default=50)
    parser.add_argument("--confirm", default="5x3")
    parser.add_argument("--searches", type=positive, default=2)
    parser.add_argument("--workers", type=positive, default=2)
    parser.add_argument("--seeds", type=positive, default=3, help="of the trainings that are judged")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    values: dict[str, list[list[list[float]]]] = {}
    cells = Cells(options.home / f"{options.study}-judged.json")
    for search in range(options.searches):
        rows = {DEFAULT: {}} | chosen(searched(options, search))
        for name in (DEFAULT, BEST_VALUE, CONFIRMED):
            runs = [
                cells.get(f"{rows[name]} {seed}", partial(judged, options.study, rows[name], seed))
                for seed in range(options.seeds)
            ]
            values.setdefault(name, []).append(runs)
    print("| | selected by | held out | held out, less the default |\n|---|---|---|---|")
    default = np.array(values[DEFAULT])
    for name, runs in values.items():
        now = np.array(runs)
        less = (now - default)[..., 1]
        less = less.mean(axis=1) if len(less) > 1 else less[0]  # the trainings of a search share its choice
        error = less.std(ddof=1) / len(less) ** 0.5 if len(less) > 1 else float("nan")
        shown = "" if name == DEFAULT else f"{less.mean():+.4f} ± {error:.4f}"
        print(f"| {name} | {now[..., 0].mean():.4f} | {now[..., 1].mean():.4f} | {shown} |")


if __name__ == "__main__":
    main()
