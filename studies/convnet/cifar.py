"""CIFAR-10 and CIFAR-100 in the binary version: what is in a directory, and its bytes as arrays. Torch-free.

A record is one byte of label (CIFAR-100: the coarse one, then the fine one, which counts) and 3 x 32 x 32 bytes of
pixels: red, green, blue, each row by row. https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.errors import DataError

if TYPE_CHECKING:
    from studies.convnet.config import Config

SIZE, PIXELS = 32, 3 * 32 * 32


@dataclass(frozen=True)
class Cifar:
    """The files of a directory. `labels` is the bytes of label before the pixels of a record."""

    train: tuple[Path, ...]
    test: Path
    labels: int
    classes: int

    def records(self, file: Path) -> np.ndarray:
        """[n, labels + PIXELS] uint8, mapped. Raises DataError for a size or a label that cannot be."""
        size, record = file.stat().st_size, self.labels + PIXELS
        if size % record or not size:
            raise DataError(
                f"{file} has {size} bytes, which is no number of records of {record}: it is cut off, or not CIFAR's."
            )
        found = np.memmap(file, np.uint8, "r").reshape(-1, record)
        if (wrong := np.flatnonzero(found[:, self.labels - 1] >= self.classes)).size:
            raise DataError(
                f"{file}: record {wrong[0]} has the label {found[wrong[0], self.labels - 1]}, and there are "
                f"{self.classes} classes: the file is damaged, or not CIFAR's."
            )
        return found

    def read(self, *files: Path) -> tuple[np.ndarray, np.ndarray]:
        """x [n, 3, 32, 32] uint8 and y [n] int64."""
        found = np.concatenate([self.records(file) for file in files])
        return found[:, self.labels :].reshape(-1, 3, SIZE, SIZE), found[:, self.labels - 1].astype(np.int64)


def find(path: str) -> Cifar:
    """What lies in a directory. Raises DataError, in one sentence, where that is not CIFAR's binary version."""
    directory = Path(path)
    if not directory.is_dir():
        raise DataError(f"data.path={path!r} is no directory: give the one that the archive was unpacked to.")
    batches = sorted(directory.glob("data_batch_*.bin"))
    ten, hundred = directory / "test_batch.bin", directory / "test.bin"
    if batches and ten.is_file():
        found = Cifar(tuple(batches), ten, 1, 10)
    elif (directory / "train.bin").is_file() and hundred.is_file():
        found = Cifar((directory / "train.bin",), hundred, 2, 100)
    elif any((directory / name).is_file() for name in ("data_batch_1", "test_batch", "train", "test")):
        raise DataError(
            f"data.path={path!r} holds CIFAR's python version, whose pickles could run any code and are not read: "
            "take the binary version, cifar-10-binary.tar.gz or cifar-100-binary.tar.gz."
        )
    else:
        raise DataError(
            f"data.path={path!r} holds neither data_batch_1.bin ... and test_batch.bin (CIFAR-10) nor train.bin and "
            "test.bin (CIFAR-100): give the directory that the binary version's archive was unpacked to."
        )
    return found


def check(config: Config) -> dict[str, int] | None:
    """Refuse what cannot be trained on before a study is written; nothing to see where pictures are generated."""
    data = config.data
    if data.path is None:
        return None
    found = find(data.path)
    train, test = sum(len(found.records(file)) for file in found.train), len(found.records(found.test))
    if train <= data.num_val:
        raise DataError(f"data.num_val={data.num_val} leaves none of the {train} training images: lower it.")
    return {"train": min(train - data.num_val, data.limit or train), "val": data.num_val, "test": test}
