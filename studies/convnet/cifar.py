"""Reads CIFAR-10 and CIFAR-100 in the binary version from a directory, as arrays. Torch-free.

A record is one byte of label (CIFAR-100: the coarse one, then the fine one, which counts) and 3 x 32 x 32 bytes of
pixels: red, green, blue, each row by row. https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.errors import DataError

SIZE, PIXELS = 32, 3 * 32 * 32


@dataclass(frozen=True)
class Cifar:
    """The files of a directory. `labels` is the number of label bytes before the pixels of a record."""

    files: dict[str, tuple[Path, ...]]  # by "train" and "test"
    labels: int
    classes: int

    def read(self, part: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns x [n, 3, 32, 32] uint8 and y [n] int64. Raises DataError for an impossible size or label."""
        records = np.concatenate([self._records(file) for file in self.files[part]])
        return records[:, self.labels :].reshape(-1, 3, SIZE, SIZE), records[:, self.labels - 1].astype(np.int64)

    def _records(self, file: Path) -> np.ndarray:
        """Returns [n, labels + PIXELS] uint8, mapped."""
        size, record = file.stat().st_size, self.labels + PIXELS
        if size % record or not size:
            raise DataError(
                f"{file} has {size} bytes, which is not a number of records of {record}: it is cut off, or not CIFAR's."
            )
        rows = np.memmap(file, np.uint8, "r").reshape(-1, record)
        if (wrong := np.flatnonzero(rows[:, self.labels - 1] >= self.classes)).size:
            raise DataError(
                f"{file}: record {wrong[0]} has the label {rows[wrong[0], self.labels - 1]}, and there are "
                f"{self.classes} classes: the file is damaged, or not CIFAR's."
            )
        return rows


def find(directory: Path) -> Cifar | None:
    """Returns the files in a directory, None if they are not CIFAR's. Raises DataError for CIFAR's python version."""
    batches = tuple(sorted(directory.glob("data_batch_*.bin")))
    ten, train, test = (directory / f"{name}.bin" for name in ("test_batch", "train", "test"))
    if batches and ten.is_file():
        numbered = [directory / f"data_batch_{n}.bin" for n in range(1, len(batches) + 1)]
        if missing := sorted({*numbered} - {*batches}):
            raise DataError(f"{missing[0]} is not there, and the training pictures after it are: put it back.")
        return Cifar({"train": batches, "test": (ten,)}, 1, 10)
    if train.is_file() and test.is_file():
        return Cifar({"train": (train,), "test": (test,)}, 2, 100)
    if any((directory / name).is_file() for name in ("data_batch_1", "test_batch", "train", "test")):
        raise DataError(
            f"data.path={str(directory)!r} holds CIFAR's python version, whose pickles could run any code and are not "
            "read: take the binary version, cifar-10-binary.tar.gz or cifar-100-binary.tar.gz."
        )
    return None
