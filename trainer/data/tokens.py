"""Holds token files, which map one long sequence of token ids on disk into memory, and data sets over them.

`NAME.bin` holds the ids (uint16 or uint32, little-endian), `NAME.ends` the end of each document (uint64), and
`NAME.json`, written last, the number of both and the sha256 of each file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.errors import DataError
from trainer.files import durable

FORMAT = 1
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def write_tokens(path: str | Path, documents: Iterable[Sequence[int] | np.ndarray | Tensor], vocab_size: int) -> None:
    """Writes `documents`, each a sequence of ids below `vocab_size`, as the token file `path` (its header's name)."""
    header = Path(path)
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    binary, ends, end = header.with_suffix(".bin"), [], 0
    header.unlink(missing_ok=True)  # until the new one is complete, there is none
    with durable.replacing(binary) as temporary:
        with open(temporary, "wb") as file:
            for number, document in enumerate(documents):
                ids = np.asarray(document, dtype=np.int64)
                if len(bad := np.flatnonzero((ids < 0) | (ids >= vocab_size))):
                    raise DataError(
                        f"document {number} has token {ids[bad[0]]} at {bad[0]}, and the vocabulary has {vocab_size}."
                    )
                file.write(ids.astype(DTYPES[dtype]).tobytes())
                end += len(ids)
                ends.append(end)
        durable.sync(temporary)
    with durable.replacing(header.with_suffix(".ends")) as temporary:
        temporary.write_bytes(np.array(ends, dtype="<u8").tobytes())
        durable.sync(temporary)
    digests = {suffix: durable.sha256(header.with_suffix(suffix)) for suffix in (".bin", ".ends")}
    fields = {"format": FORMAT, "dtype": dtype, "tokens": end, "documents": len(ends), "vocab_size": vocab_size}
    durable.write_text(header, json.dumps(fields | {"sha256": digests}))


class TokenFile:
    """A mapped token file of `len` tokens; `file[a:b]` are ids as int64.

    Its sizes are checked when it is opened, its content by `verify`, which reads all of it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            header = json.loads(self.path.read_text())
            if header["format"] != FORMAT:
                raise DataError(f"{path} has format {header['format']}, and this version reads {FORMAT}.")
            self.dtype, self.size, self.vocab_size = DTYPES[header["dtype"]], header["tokens"], header["vocab_size"]
            self.num_documents, self._sha256 = header["documents"], header["sha256"]
        except FileNotFoundError as error:
            raise DataError(f"{path} does not exist: write it with trainer.data.write_tokens.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is not the header of a token file: write it anew.") from error
        self._check_size(".bin", self.size * self.dtype.itemsize)
        self._check_size(".ends", self.num_documents * 8)
        self._tokens: np.ndarray | None = None

    def _check_size(self, suffix: str, expected: int) -> None:
        file = self.path.with_suffix(suffix)
        size = file.stat().st_size if file.is_file() else None
        if size != expected:
            raise DataError(f"{file} has {size or 'no'} bytes instead of {expected}: write {self.path} anew.")

    def verify(self) -> None:
        """Raises DataError unless both files are unchanged since they were written."""
        for suffix, expected in self._sha256.items():
            if durable.sha256(self.path.with_suffix(suffix)) != expected:
                raise DataError(f"{self.path.with_suffix(suffix)} has another sha256 than {self.path} says.")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, span: slice) -> Tensor:
        if self.size == 0:
            return torch.zeros(0, dtype=torch.int64)
        if self._tokens is None:
            mapped = np.memmap(self.path.with_suffix(".bin"), self.dtype, "r", shape=(self.size,))
            self._tokens = np.asarray(mapped)  # a view: slicing the memmap itself would make another one, for 10 us
        return torch.from_numpy(np.array(self._tokens[span], dtype=np.int64))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokens": None}  # mapped again by the receiver: pickled, it would be copied

    @property
    def ends(self) -> np.ndarray:
        """Returns the end of each document [documents]."""
        return np.fromfile(self.path.with_suffix(".ends"), dtype="<u8").astype(np.int64)


class TokenBlocks:
    """The tokens in blocks of `length`, each [length]; neighbours share `overlap` of them, and a rest is unused.

    With an overlap of 1 a model that predicts each block's tokens but the first predicts every token once.
    """

    draws = False

    def __init__(self, file: TokenFile, length: int, overlap: int = 1) -> None:
        if not 0 <= overlap < length:
            raise DataError(f"TokenBlocks has overlap {overlap} and length {length}: the overlap must be shorter.")
        if len(file) < length:
            raise DataError(f"{file.path} has {len(file)} tokens, fewer than one block of {length}.")
        self.file, self.length, self.step = file, length, length - overlap

    def __len__(self) -> int:
        return (len(self.file) - self.length) // self.step + 1

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.file[index * self.step : index * self.step + self.length]


class TokenDocuments:
    """A data set of the documents, each [its length]; `lengths` are known without reading them."""

    draws = False

    def __init__(self, file: TokenFile) -> None:
        self.file, self._ends = file, file.ends
        self.lengths = np.diff(self._ends, prepend=0)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Tensor:
        end = int(self._ends[index])
        return self.file[end - int(self.lengths[index]) : end]
