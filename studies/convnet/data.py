"""Holds images and classes by split, as tensors of bytes."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from studies.convnet import shapes, source
from studies.convnet.config import DataConfig

NUM_TEST = 1000  # generated pictures


def num_classes(data: DataConfig) -> int:
    return shapes.CLASSES if data.path is None else source.find(data.path, data.image_size).classes


def split(data: DataConfig, name: str) -> tuple[Tensor, Tensor]:
    """Returns x [n, 3, size, size] uint8 and y [n] of "train", "val" or "test".

    They are read-only: trials of a process share them.
    """
    if data.path is not None:
        return _read(data.path, data.image_size, data.num_val, data.limit, data.seed)[name]
    pictures = data.pictures
    count = {"train": pictures.num_train, "val": data.num_val, "test": NUM_TEST}[name]
    # A separate seed, so that the size of one split does not affect another.
    seed = 3 * data.seed + ("train", "val", "test").index(name)
    x, y = _generated(count, pictures.size, pictures.noise, seed)
    return x, _mislabelled(y, pictures.mislabelled, seed) if name == "train" else y


@lru_cache(maxsize=4)
def _generated(count: int, size: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    x, y = shapes.pictures(count, size, noise, seed)
    return torch.from_numpy(x), torch.from_numpy(y)


def _mislabelled(y: Tensor, share: float, seed: int) -> Tensor:
    """Returns `y` with about a `share` of it in another class, each other class equally likely."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(len(y), generator=generator) < share
    other = (y + torch.randint(1, shapes.CLASSES, y.shape, generator=generator)) % shapes.CLASSES
    return torch.where(wrong, other, y)


@lru_cache(maxsize=1)
def _read(
    path: str, image_size: int | None, num_val: int, limit: int | None, seed: int
) -> dict[str, tuple[Tensor, Tensor]]:
    images = source.parts(path, image_size, num_val, limit, seed)
    return {name: (torch.from_numpy(x), torch.from_numpy(y)) for name, (x, y) in images.items()}
