"""Caches expensive samples on disk once they have been made."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import time
import zlib
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from trainer.data.view import View, collate, samples
from trainer.errors import DataError

_STALE = 3600.0  # seconds after which an unfinished file is abandoned


def publish(target: Path, data: bytes) -> None:
    """Makes `target` hold `data` atomically; any number of processes may do so, and be killed in the middle."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.write_bytes(data)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


class Cached(View):
    """Reads each sample of `data` from `directory` once any process has made it there.

    `key` identifies the samples: a hash of the source and of all that changes them. Each key has its own cache. A
    sample must be a function of its index alone, so a data set that draws random numbers is refused: augment the
    cache's output instead. Tensors and plain values only, since files are loaded with `weights_only`.
    """

    def __init__(self, data: Any, directory: str | Path, key: str) -> None:
        super().__init__(data)
        if self.draws:
            raise DataError(
                f"Cached was given {type(data).__name__}, which may draw random numbers: set `draws = False` on it if "
                "it draws none."
            )
        if not key:
            raise DataError("Cached needs a key: a hash of what the samples are made of.")
        self.directory = Path(directory) / blake2b(key.encode(), digest_size=16).hexdigest()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._sweep()

    def __getitem__(self, index: int) -> Any:
        file = self.directory / f"{index % 256:02x}" / f"{index}.pt"
        with contextlib.suppress(FileNotFoundError, _Damaged):
            return _unpack(file.read_bytes())
        [sample] = samples(self.data, [index])
        packed = _pack(sample)
        try:
            kept = _unpack(packed)  # returns the sample as it will be read later, and fails now if it could not be
        except pickle.UnpicklingError as error:
            raise DataError(
                f"sample {index} of {type(self.data).__name__} cannot be cached: tensors and plain values only."
            ) from error
        publish(file, packed)
        return kept

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return collate(self.data)([self[index] for index in indices])

    def _sweep(self) -> None:
        """Removes files whose writer was killed."""
        for file in self.directory.glob("*/.*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - file.stat().st_mtime > _STALE:
                    file.unlink()


class _Damaged(Exception):
    """Raised for bytes other than those written, as after a power cut: the sample is made again."""


def _pack(sample: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(sample, buffer)
    data = buffer.getvalue()
    return zlib.crc32(data).to_bytes(4, "little") + data


def _unpack(packed: bytes) -> Any:
    data = packed[4:]
    if len(packed) < 4 or zlib.crc32(data).to_bytes(4, "little") != packed[:4]:
        raise _Damaged
    return torch.load(io.BytesIO(data), weights_only=True)
