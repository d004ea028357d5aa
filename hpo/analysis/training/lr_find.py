"""Implements `hpo lr-find`, the learning-rate range test of a study's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpo.analysis.training.single_process import for_one_process, stepped
from hpo.declaration.references import load
from hpo.declaration.search_preset import as_new
from hpo.door import option
from hpo.errors import UserError
from trainer.diagnose.range_test import RangeTest

ROWS = 15


def lr_find(reference: str, overrides: Mapping[str, object], low: float, high: float, steps: int) -> RangeTest:
    """Trains `steps` windows of the study's configuration under `overrides`, at rates from `low` to `high`."""
    from trainer.diagnose.trial import find_lr

    if not 0 < low < high:
        raise UserError(
            f"{option('low', format(low, 'g'))} and {option('high', format(high, 'g'))}: give two rates above 0, the "
            "lower one first."
        )
    study = as_new(load(reference), overrides)
    config = for_one_process(study.config)
    task = stepped(study, config, "which the range test cannot step through")
    return find_lr(task, config.train, low, high, steps)


def describe(found: RangeTest) -> str:
    """Returns the smoothed loss at some of the rates, and the suggestion."""
    last = len(found.lrs) - 1
    shown = sorted({round(i * last / (ROWS - 1)) for i in range(ROWS)}) if found.lrs else []
    rows = [f"{found.lrs[i]:>10.3g}  {found.losses[i]:.5g}" for i in shown]
    if found.suggestion is None:
        advice = f"the loss falls nowhere: try other bounds, more {option('steps')}, or look at the data."
    else:
        advice = (
            f"suggested: train.optim.lr={found.suggestion:.2g}, where the loss falls fastest; "
            f"a cautious choice is {found.cautious:.2g}, a tenth of the rate of the least loss."
        )
    return "\n".join([f"{'lr':>10}  loss, smoothed", *rows, advice])


def draw(found: RangeTest, title: str, path: Path) -> None:
    """Writes a picture of the loss over the rates."""
    from trainer.diagnose import figures, pictures

    figures.save(pictures.range_test(title, found), path)
