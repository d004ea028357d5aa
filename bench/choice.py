"""Whether what a search of `atft` chooses holds on days that no search has seen.

    python bench/choice.py --home DIR [--first 100] [--markets 4] [--trials 50] [--confirm 5x3] [--seeds 2]
    python bench/choice.py --home DIR --preset none --confirm 5x3folds

On each market (`data.seed`) a search is run and confirmed; a home goes on from what it has. Three configurations are
then trained anew under other seeds and judged on the test days: the default, the trial with the best value of the
search, and the trial that `hpo best` names after the confirmation. A fourth row is that trial or, where the default
has the better mean in the confirmation, the default. A preset is of the search alone: what it chooses trains on all
days. Printed are the tables of `studies.atft.results`: RankIC and, as agreement, the rank correlation with the known
conditional mean.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import hpo
from bench.machine import machine
from hpo.search.confirming import DEFAULT_NAME
from hpo.space.config import apply, as_json, flatten, parse_override
from studies.atft import STUDY
from studies.atft.baseline import positive
from studies.atft.config import Config
from studies.atft.results import DEFAULT, measured, report

BEST_VALUE, CONFIRMED, ADVISED = "best value", "confirmed", "confirmed or default"


def searched(options: argparse.Namespace, market: int, overrides: dict[str, Any]) -> hpo.StudyHandle:
    """Returns the confirmed study of a market."""
    start = time.perf_counter()
    study = hpo.run(
        "atft",
        name=f"market-{market}",
        trials=options.trials,
        workers=options.workers,
        confirm=options.confirm,
        learn_from="none",
        overrides={"preset": options.preset, "data.seed": market, **overrides},
        enqueue=[default_trial()] if options.with_default else None,
        home=options.home,
        progress=False,
    )
    print(f"market {market}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return study


def default_trial() -> dict[str, Any]:
    """Returns the default configuration as a trial."""
    defaults = flatten(as_json(Config()))
    params = {path: defaults.get(path, 1.0) for path in STUDY.space.paths}  # loss.horizon_weights are 1 where not set
    return params | {"train.optim.weight_decay": 0.01}  # AdamW's own


def chosen(study: hpo.StudyHandle) -> dict[str, dict[str, Any]]:
    """Returns the parameters of each choice; those of the default are empty. Exits if the search was interrupted."""
    if (state := study.status().state) != "complete":
        sys.exit(f"study {study.name} is {state}: run this again, which goes on with it.")
    best = study.best
    seeds = best["seeds"] or {"selected": None, "rivals": []}  # None: the confirmation has not compared any
    selected = seeds["selected"] or [best["number"]]
    first = min(selected, key=int)
    default_leads = any(rival["name"] == DEFAULT_NAME and rival["ahead"]["mean"] < 0 for rival in seeds["rivals"])
    print(f"  {study.name}: value {first}, confirmed {best['number']}, default leads: {default_leads}", file=sys.stderr)
    return {
        BEST_VALUE: study.trial(int(first))["params"],
        CONFIRMED: best["params"],
        ADVISED: {} if default_leads else best["params"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, required=True, help="of the studies, and of the scores of trainings")
    parser.add_argument("--first", type=int, default=100, metavar="N", help="the markets N, N + 1, ...")
    parser.add_argument("--markets", type=positive, default=4)
    parser.add_argument("--trials", type=positive, default=50)
    parser.add_argument("--confirm", default="5x3")
    parser.add_argument("--preset", default=STUDY.search_preset, help="of the search alone")
    parser.add_argument("--with-default", action="store_true", help="the first trial is the default configuration")
    parser.add_argument("--workers", type=positive, default=2)
    parser.add_argument("--seeds", type=positive, default=2, help="of the trainings that are judged")
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="PATH=VALUE")
    options = parser.parse_args()
    overrides = dict(parse_override(text) for text in options.overrides)
    torch.set_num_threads(1)
    print(machine())
    cells = []
    for market in range(options.first, options.first + options.markets):
        choices = chosen(searched(options, market, overrides))
        base = apply(Config(), {"data.seed": market, "data.split.test": True, **overrides})
        rows = {DEFAULT: base} | {name: apply(base, params) for name, params in choices.items()}
        cells.append(measured(base, rows, options.seeds, options.home / "scores"))
    print(report(cells, Config().data.horizons))


if __name__ == "__main__":
    main()
