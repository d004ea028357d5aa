"""Loads the digits, split once: 1077 images to train on, 360 to select by, 360 to test the selection."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TRAIN, VAL = 1077, 360


@lru_cache(maxsize=4)
def digits(split_seed: int, fold: int = 0, folds: int = 1) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns train, val and test as (x [n, 64] in [0, 1], y [n]), by a permutation drawn from `split_seed`.

    With several `folds`, the images before the test's are divided: those of `fold` are val, the others train.
    Read-only: trials of one process share it.
    """
    pixels, classes = _images()
    order = np.random.default_rng(split_seed).permutation(len(classes))
    x = torch.from_numpy(pixels[order] / 16.0).float()
    y = torch.from_numpy(classes[order]).long()
    indices = np.arange(len(order))
    parts = np.split(indices, [TRAIN, TRAIN + VAL])
    if folds > 1:
        val = np.array_split(indices[: TRAIN + VAL], folds)[fold]
        parts = [np.setdiff1d(indices[: TRAIN + VAL], val), val, parts[2]]
    return {name: (x[part], y[part]) for name, part in zip(("train", "val", "test"), parts, strict=True)}


def _images() -> tuple[np.ndarray, np.ndarray]:
    """Returns pixels [n, 64] from 0 to 16 and classes [n], as `sklearn.datasets.load_digits(return_X_y=True)` does.

    It reads scikit-learn's file alone: the import takes 1.6 s of a processor, more than a trial here, and 100 MiB.
    """
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the digits come with scikit-learn: pip install scikit-learn.")
    rows = np.loadtxt(Path(spec.origin).with_name("datasets") / "data" / "digits.csv.gz", delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(int)
