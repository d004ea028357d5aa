"""What a directory has to train and to test on: CIFAR's files, or folders of images. Torch-free."""

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
    """What lies in a directory. Raises DataError, in one sentence, where that cannot be read."""
    directory = Path(path)
    if not directory.is_dir():
        raise DataError(f"data.path={path!r} is no directory: give that of the images, or of CIFAR's files.")
    found = cifar.find(directory)
    if found is not None and image_size is not None:
        raise DataError(f"data.image_size={image_size} is for folders of images, and {path} holds CIFAR: leave it out.")
    found = found or folders.find(directory, image_size)
    if found is None:
        raise DataError(
            f"data.path={path!r} holds neither CIFAR's binary version (data_batch_1.bin ... and test_batch.bin, or "
            "train.bin and test.bin) nor a folder of images for each class."
        )
    if isinstance(found, Folders) and found.classes == 1:
        raise DataError(f"{path} has one class, {found.names[0]}: give two or more folders.")
    return found


def parts(path: str, image_size: int | None, num_val: int, limit: int | None, seed: int) -> dict[str, Images]:
    """Of a directory: `train`, `val` and `test`. What it has none of to test with is drawn as val is.

    Raises DataError for what cannot be read, and where nothing is left to train on.
    """
    found = find(path, image_size)
    x, y = found.read("train")
    order = np.random.default_rng(seed).permutation(len(y))
    has_test = "test" in found.files
    kept = order[num_val if has_test else 2 * num_val :][:limit]
    if not kept.size:
        wanted = "" if has_test else " to select by, and as many to test with,"
        raise DataError(f"data.num_val={num_val}{wanted} leaves none of the {len(y)} training images: lower it.")
    val, held = order[:num_val], order[num_val : 2 * num_val]
    test = found.read("test") if has_test else (x[held], y[held])
    return {"train": (x[kept], y[kept]), "val": (x[val], y[val]), "test": test}


def check(config: Config) -> dict[str, int] | None:
    """Refuse what cannot be trained on before a study is written; nothing to see where pictures are generated."""
    data = config.data
    if data.path is None:
        return None
    found = parts(data.path, data.image_size, data.num_val, data.limit, data.seed)
    return {name: len(y) for name, (_, y) in found.items()}
