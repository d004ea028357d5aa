"""Splits walk-forward: train, then a gap, then validation; the last block of days is kept for the end. Torch-free.

    | warm-up | train ........ | purge + embargo | val | purge + embargo | test | longest horizon |

A target of day t reads prices up to t + horizon, so the last training target ends at most `purge` days later: before
validation begins. Validation blocks of successive folds follow each other. Training starts at the beginning, or has
the last `train_days` before the gap (Lopez de Prado, Advances in Financial Machine Learning, 2018, chapter 7).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from studies.atft.config import DataConfig
from trainer.errors import DataError


@dataclass(frozen=True)
class Split:
    """Day indices, each increasing: no target of one part reaches into the next."""

    train: np.ndarray
    val: np.ndarray
    test: np.ndarray


def walk_forward(num_days: int, config: DataConfig) -> Split:
    """Splits `num_days` trading days for the configured fold; raises DataError with the days it needs if too few."""
    split = config.split
    gap = split.purge + split.embargo
    first = max(config.lookback - 1, config.graph.window)
    test_start = num_days - config.horizons[-1] - split.test_days
    val_start = test_start - gap - split.val_days * (split.num_folds - split.fold)
    train_end = val_start - gap
    if train_end - first < split.min_train_days:
        raise DataError(_too_few(num_days, num_days + split.min_train_days - (train_end - first), config))
    return Split(
        train=np.arange(max(first, train_end - split.train_days) if split.train_days else first, train_end),
        val=np.arange(val_start, val_start + split.val_days),
        test=np.arange(test_start, test_start + split.test_days),
    )


def _too_few(num_days: int, needed: int, config: DataConfig) -> str:
    """Returns the sentence about `num_days` if `needed` are required, with a proportional split that fits, if any."""
    split = config.split
    folds = split.num_folds - split.fold
    parts = {"min_train_days": split.min_train_days, "val_days": split.val_days, "test_days": split.test_days}
    fixed = needed - split.min_train_days - folds * split.val_days - split.test_days
    share = (num_days - fixed) / (needed - fixed)
    smaller = {name: int(days * share) for name, days in parts.items()}
    fits = smaller["min_train_days"] >= config.block_days and min(smaller.values()) > 0
    instead = ", or set " + " ".join(f"data.split.{name}={days}" for name, days in smaller.items()) if fits else ""
    more = "give more days" if config.path else f"set data.market.num_days={needed}"
    of_folds = f" in each of {folds} folds" if folds > 1 else ""
    return (
        f"{config.path or 'the synthetic market'} has {num_days} trading days, and the split takes {needed}: at least "
        f"{split.min_train_days} to train on, {split.val_days} to validate on{of_folds}, {split.test_days} for the "
        f"test, {fixed} before, between and after them; {more}{instead}."
    )


def blocks(days: np.ndarray, size: int) -> list[np.ndarray]:
    """Cuts consecutive days into blocks of at least `size` (one block if there are fewer)."""
    return np.array_split(days, max(1, len(days) // size))
