"""Reads WebDataset shards (tar archives) by index rather than as a stream, so in any order and from any position.

In such an archive the files of one sample are adjacent and share their name up to its first dot; the rest is the file's
kind (`0007.jpg`, `0007.cls`).
"""

from __future__ import annotations

import io
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.data.cache import publish
from trainer.errors import DataError
from trainer.files import tar_shards

FORMAT = 1
Decoder = Callable[[bytes], Any]
DECODERS: dict[str, Decoder] = {
    "txt": lambda data: data.decode("utf-8"),
    "json": json.loads,
    "cls": int,
    "npy": lambda data: torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False)),
}


class TarShards:
    """The samples of uncompressed tar shards, each a dict: its key as `__key__`, and its files by their endings.

    `decoders` maps an ending to a function from bytes to a value, in addition to DECODERS; other files stay bytes. The
    files' offsets are scanned once and kept next to the shard (`SHARD.index.json`), or in `index_directory`.
    """

    draws = False

    def __init__(
        self,
        shards: Sequence[str | Path],
        decoders: Mapping[str, Decoder] | None = None,
        index_directory: str | Path | None = None,
    ) -> None:
        self.shards = [Path(shard) for shard in shards]
        self.decoders = DECODERS | dict(decoders or {})
        self._samples = [_index(shard, Path(index_directory or shard.parent)) for shard in self.shards]
        self._ends = list(accumulate(map(len, self._samples)))
        if not self._ends or self._ends[-1] == 0:
            raise DataError(f"TarShards was given no sample ({len(self.shards)} shards).")
        self._endings = sorted(ending for ending, _, _ in next(filter(None, self._samples))[0][1])

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = bisect_right(self._ends, index)
        key, files = self._samples[shard][index - self._ends[shard]]  # counted from the shard's end
        if (endings := sorted(ending for ending, _, _ in files)) != self._endings:
            raise DataError(f"{self.shards[shard]}, sample {key!r} has {endings}, and the first has {self._endings}.")
        return read_sample(self.shards[shard], (key, files), self.decoders)


def read_sample(shard: Path, sample: tar_shards.Sample, decoders: Mapping[str, Decoder]) -> dict[str, Any]:
    """Returns a sample of a shard: its key as `__key__`, and its files by their endings, decoded."""
    key, files = sample
    values: dict[str, Any] = {"__key__": key}
    with open(shard, "rb") as archive:
        for ending, offset, size in files:
            archive.seek(offset)
            data, decode = archive.read(size), decoders.get(ending)
            try:
                values[ending] = data if decode is None else decode(data)
            except Exception as error:
                raise DataError(f"{shard}, file {key}.{ending} cannot be decoded ({error}).") from error
    return values


def _index(shard: Path, directory: Path) -> list[Any]:
    """Returns [(key, [(ending, offset, size)])] of a shard, from the stored index if the shard is unchanged."""
    kept = directory / f"{shard.name}.index.json"
    try:
        status = shard.stat()
        now = {"format": FORMAT, "size": status.st_size, "mtime": status.st_mtime_ns}
        if kept.is_file():
            index = json.loads(kept.read_text())
            if index["of"] == now:
                return index["samples"]
        samples = tar_shards.scan(shard)
    except OSError as error:
        raise DataError(f"{shard} cannot be read ({error.strerror}).") from error
    publish(kept, json.dumps({"of": now, "samples": samples}).encode())
    return samples
