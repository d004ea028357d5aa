"""Reads tables from files as tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trainer.data.tensors import TensorDataset
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.files import tables

Columns = Mapping[str, str | Sequence[str]]


class TableDataset(TensorDataset):
    """Columns of one or several Parquet, Arrow, CSV or JSON Lines files, their rows one after another.

    `columns` maps the tensors of a sample to columns: `{"x": ["open", "close"], "y": "label"}` gives x: [2] and y: [].
    A tensor is float32, or int64 or bool if all its columns are; `dtypes` overrides that by its name. A value that is
    missing, not finite, or lost by the conversion is refused with its file, row and column.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        columns: Columns,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        from trainer.files import tables  # only here: pyarrow takes a quarter of a second to import

        paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
        if not paths or not columns:
            raise DataError("TableDataset needs at least one file and one column.")
        if unknown := set(dtypes or {}) - set(columns):
            raise DataError(f"TableDataset has a dtype for {min(unknown)!r}, which is none of {', '.join(columns)}.")
        needed = dict.fromkeys(name for names in columns.values() for name in _names(names))
        sources = [tables.read(path, tuple(needed)) for path in paths]
        super().__init__(**{key: _tensor(sources, names, (dtypes or {}).get(key)) for key, names in columns.items()})


def _names(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


def _tensor(sources: list[tables.Source], names: str | Sequence[str], dtype: torch.dtype | None) -> Tensor:
    read = [[(source, name, source.numbers(name)) for name in _names(names)] for source in sources]
    kinds = {values.dtype.kind for row in read for _, _, values in row}
    if dtype is None:
        dtype = torch.bool if kinds == {"b"} else torch.int64 if kinds <= {"b", "i", "u"} else torch.float32
    stacked = [torch.stack([_convert(*column, dtype) for column in row], dim=1) for row in read]
    return torch.cat(stacked).squeeze(1) if isinstance(names, str) else torch.cat(stacked)


def _convert(source: tables.Source, name: str, values: np.ndarray, dtype: torch.dtype) -> Tensor:
    with np.errstate(over="ignore", invalid="ignore"):
        tensor = torch.from_numpy(np.array(values)).to(dtype)
    back = tensor.double().numpy() if dtype.is_floating_point else tensor.numpy()
    lost = ~np.isfinite(back) if dtype.is_floating_point else back != values
    if len(rows := np.flatnonzero(lost)):
        raise DataError(f"{source.cell(int(rows[0]), name)} is {values[rows[0]]}: it does not fit {dtype}.")
    return tensor
