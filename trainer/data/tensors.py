"""Holds data sets that fit in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.errors import DataError


class TensorDataset:
    """Tensors of equal length, indexed along the first dimension; a whole batch is one gather per tensor.

    `TensorDataset(x, y)` gives tuples `(x[i], y[i])`; `TensorDataset(x=x, y=y)` gives dicts of the same.
    """

    draws = False  # reading it uses no random number, so the loader need not seed before each batch

    def __init__(self, *tensors: Tensor, **named: Tensor) -> None:
        if bool(tensors) == bool(named):
            raise DataError("TensorDataset takes tensors either by position or by name: give one or the other.")
        self._keys = tuple(named)
        self._tensors = tensors or tuple(named.values())
        lengths = [len(t) for t in self._tensors]
        if len(set(lengths)) > 1:
            raise DataError(f"TensorDataset got tensors of different lengths {lengths}: make them equal.")

    def __len__(self) -> int:
        return len(self._tensors[0])

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of one sample."""
        return sum(t.nbytes // max(len(t), 1) for t in self._tensors)

    def __getitem__(self, index: int) -> Any:
        return self._pack(tuple(t[index] for t in self._tensors))

    def __getitems__(self, indices: Sequence[int]) -> Any:
        rows = torch.as_tensor(indices)
        return self._pack(tuple(t.index_select(0, rows) for t in self._tensors))

    def _pack(self, values: tuple[Tensor, ...]) -> Any:
        return dict(zip(self._keys, values, strict=True)) if self._keys else values
