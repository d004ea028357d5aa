"""Finds the training and test images of a directory: CIFAR's files, or folders of images. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from studies.convnet import cifar, folders
from studies.convnet.cifar import Cifar
from studies.convnet.folders import Folders
from trainer.errors import DataError

if TYPE_CHECKING:
    from studies.convnet.config import Config

Images = tuple[np.ndarray, np.ndarray]  # x [n, 3, height, width] uint8, y [n] int64


def find(path: str, image_size: int | None) -> Cifar | Folders:
    """Returns the images in a directory. Raises DataError, in one sentence, if they cannot be read."""
    directory = Path(path)
    if not directory.is_dir():
        raise DataError(f"data.path={path!r} is not a directory: give that of the images, or of CIFAR's files.")
    images = cifar.find(directory)
    if images is not None and image_size is not None:
        raise DataError(f"data.image_size={image_size} is for folders of images, and {path} holds CIFAR: leave it out.")
    images = images or folders.find(directory, image_size)
    if images is None:
        raise DataError(
            f"data.path={path!r} holds neither CIFAR's binary version (data_batch_1.bin ... and test_batch.bin, or "
            "train.bin and test.bin) nor a folder of images for each class."
        )
    if isinstance(images, Folders) and images.classes == 1:
        raise DataError(f"{path} has one class, {images.names[0]}: give two or more folders.")
    return images


def parts(path: str, image_size: int | None, num_val: int, limit: int | None, seed: int) -> dict[str, Images]:
    """Returns `train`, `val` and `test` of a directory. A missing test set is drawn as val is.

    Raises DataError for unreadable files, and if nothing is left to train on.
    """
    images = find(path, image_size)
    x, y = images.read("train")
    order = np.random.default_rng(seed).permutation(len(y))
    has_test = "test" in images.files
    kept = order[num_val if has_test else 2 * num_val :][:limit]
    if not kept.size:
        wanted = "" if has_test else " to select by, and as many to test with,"
        raise DataError(f"data.num_val={num_val}{wanted} leaves none of the {len(y)} training images: lower it.")
    val, tested = order[:num_val], order[num_val : 2 * num_val]
    test = images.read("test") if has_test else (x[tested], y[tested])
    return {"train": (x[kept], y[kept]), "val": (x[val], y[val]), "test": test}


def check(config: Config) -> dict[str, int] | None:
    """Refuses unusable data before a study is written; returns None if pictures are generated."""
    data = config.data
    if data.path is None:
        return None
    images = parts(data.path, data.image_size, data.num_val, data.limit, data.seed)
    return {name: len(y) for name, (_, y) in images.items()}
