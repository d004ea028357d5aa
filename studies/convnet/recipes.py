"""Compares training recipes: each of them under three seeds, as one study, and the table of results.

    hpo run --study studies/convnet/recipes.py --trials 33
    hpo compare --study convnet-recipes --top 100 --json | python -m studies.convnet.recipes

The table gives mean and standard error of val/accuracy after the last epoch, over the seeds of a recipe.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from hpo import Choice, Objective, Study
from studies.convnet.config import Config

SEEDS = (0, 1, 2)
SMOOTHING = "loss.label_smoothing"  # exists only for cross-entropy
SGD = {"train.optim.name": "sgd", "train.optim.lr": 0.1, "train.optim.weight_decay": 5e-4}
ADAMW = {"train.optim.name": "adamw", "train.optim.lr": 0.01, "train.optim.weight_decay": 0.05}
SLOWER = {"train.optim.lr": 0.003}
PLAIN = {
    **SGD,
    "train.schedule.name": "one_cycle",
    "train.optim.wrap": "none",
    "loss.name": "cross_entropy",
    SMOOTHING: 0.0,
    "augment.mixup": 0.0,
    "augment.flip": True,
    "augment.crop": 2,
}
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "SGD, one cycle": PLAIN,
    "SGD, cosine": {**PLAIN, "train.schedule.name": "cosine"},
    "AdamW at 0.01, one cycle": {**PLAIN, **ADAMW},
    "AdamW at 0.003, one cycle": {**PLAIN, **ADAMW, **SLOWER},
    "AdamW at 0.01, cosine": {**PLAIN, **ADAMW, "train.schedule.name": "cosine"},
    "AdamW at 0.003, cosine": {**PLAIN, **ADAMW, **SLOWER, "train.schedule.name": "cosine"},
    "SGD, one cycle, SAM": {**PLAIN, "train.optim.wrap": "sam"},
    "SGD, one cycle, mixup 0.2": {**PLAIN, "augment.mixup": 0.2},
    "SGD, one cycle, label smoothing 0.1": {**PLAIN, SMOOTHING: 0.1},
    "SGD, one cycle, focal": {**{path: PLAIN[path] for path in PLAIN if path != SMOOTHING}, "loss.name": "focal"},
    "SGD, one cycle, not augmented": {**PLAIN, "augment.flip": False, "augment.crop": 0},
}


def _values(path: str) -> list[Any]:
    """Returns the recipes' values of a field, each once."""
    return sorted({recipe[path] for recipe in RECIPES.values() if path in recipe})


STUDY = Study(
    name="convnet-recipes",
    config=Config(),
    task="studies.convnet.task:ConvnetTask",
    check="studies.convnet.source:check",
    space={
        "train.seed": Choice(SEEDS),
        **{path: Choice(_values(path)) for path in PLAIN if path != SMOOTHING},
        SMOOTHING: Choice(_values(SMOOTHING), when={"loss.name": "cross_entropy"}),
    },
    enqueue=[{**recipe, "train.seed": seed} for seed in SEEDS for recipe in RECIPES.values()],
    objectives=[Objective("val/accuracy", "maximize")],
    metrics=("train/loss", "val/*", "test/*"),
    data_paths=("data.path",),
    sampler="random",
    strategy="none",
)


def table(trials: Sequence[Mapping[str, Any]]) -> str:
    """Returns the recipes, best first, from the trials that `hpo compare --json` shows; other trials are left out."""
    accuracies: dict[str, list[float]] = {}
    for trial in trials:
        for name, recipe in RECIPES.items():
            is_one = all(trial.get(f"params.{path}") == value for path, value in recipe.items())
            if trial["state"] == "complete" and is_one:
                accuracies.setdefault(name, []).append(trial["values.val/accuracy"])
    rows = [
        f"| {name} | {_shown(accuracies[name])} |"
        for name in sorted(accuracies, key=lambda name: -fmean(accuracies[name]))
    ]
    return "\n".join(["| recipe | val/accuracy | seeds |", "|---|---|---|", *rows])


def _shown(values: Sequence[float]) -> str:
    error = f" ± {stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{error} | {len(values)}"


def main() -> None:
    try:
        trials = json.load(sys.stdin)
        text = table(trials)
    except (ValueError, TypeError, KeyError, AttributeError):
        sys.exit(_refused("what is read is not JSON of trials"))
    if text.count("\n") < 2:
        sys.exit(_refused(f"of the {len(trials)} trials that are read none is a complete one of a recipe"))
    print(text)


def _refused(what: str) -> int:
    command = "hpo compare --study convnet-recipes --top 100 --json"
    print(f"error: {what}: pipe `{command}` into this, with trials that have ended.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
