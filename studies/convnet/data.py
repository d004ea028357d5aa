"""Images and classes by split, as tensors of bytes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from studies.convnet import cifar, shapes
from studies.convnet.config import DataConfig

NUM_TEST = 1000  # generated pictures


def num_classes(data: DataConfig) -> int:
    return shapes.CLASSES if data.path is None else cifar.find(data.path).classes


def split(data: DataConfig, name: str) -> tuple[Tensor, Tensor]:
    """x [n, 3, size, size] uint8 and y [n] of "train", "val" or "test". Read-only: trials of a process share it."""
    if data.path is not None:
        return _read(data.path, name, data.num_val, data.limit, data.seed)
    pictures = data.pictures
    count = {"train": pictures.num_train, "val": data.num_val, "test": NUM_TEST}[name]
    seed = 3 * data.seed + ("train", "val", "test").index(name)  # of its own: the size of one says nothing of another
    return _generated(count, pictures.size, pictures.noise, seed)


@lru_cache(maxsize=4)
def _generated(count: int, size: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    x, y = shapes.pictures(count, size, noise, seed)
    return torch.from_numpy(x), torch.from_numpy(y)


@lru_cache(maxsize=4)
def _read(path: str, name: str, num_val: int, limit: int | None, seed: int) -> tuple[Tensor, Tensor]:
    found = cifar.find(path)
    if name == "test":
        x, y = found.read(found.test)
    else:
        x, y = found.read(*found.train)
        order = np.random.default_rng(seed).permutation(len(y))
        chosen = order[:num_val] if name == "val" else order[num_val:][:limit]
        x, y = x[chosen], y[chosen]
    return torch.from_numpy(x), torch.from_numpy(y)
