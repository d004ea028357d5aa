"""Walk-forward: train, then a gap, then validation; the last block of days is kept for the end. Torch-free.

    | warm-up | train ........ | purge + embargo | val | purge + embargo | test | longest horizon |

A target of day t reads prices up to t + horizon, so the last training target ends at most `purge` days later: before
validation begins. Validation blocks of successive folds follow each other; training always starts at the beginning
(Lopez de Prado, Advances in Financial Machine Learning, 2018, chapter 7).
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
    """Split `num_days` trading days for the configured fold, or raise DataError saying how many days it takes."""
    split = config.split
    gap = split.purge + split.embargo
    first = max(config.lookback - 1, config.graph.window)
    test_start = num_days - config.horizons[-1] - split.test_days
    val_start = test_start - gap - split.val_days * (split.num_folds - split.fold)
    train_end = val_start - gap
    if train_end - first < split.min_train_days:
        raise DataError(
            f"{config.path or 'the synthetic market'} has {num_days} trading days, which leaves "
            f"{max(0, train_end - first)} to train on where data.split.min_train_days asks for {split.min_train_days}: "
            "give more days, or lower data.split.val_days, test_days or num_folds."
        )
    return Split(
        train=np.arange(first, train_end),
        val=np.arange(val_start, val_start + split.val_days),
        test=np.arange(test_start, test_start + split.test_days),
    )


def blocks(days: np.ndarray, size: int) -> list[np.ndarray]:
    """Cut consecutive days into blocks of at least `size` (one block if there are fewer)."""
    return np.array_split(days, max(1, len(days) // size))
