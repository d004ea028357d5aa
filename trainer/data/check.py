"""Checks some of the data before training on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.data.view import order, read
from trainer.errors import DataError

ROWS = 32


def check(data: Any, rows: int = ROWS) -> None:
    """Checks `rows` samples from all over `data`; raises DataError, naming the sample, at the first bad one.

    Every tensor must have the first sample's dtype, its shape (unless `data` collates its samples itself), and finite
    values. If `data` has an attribute `classes`, as in `{"label": 10}`, that tensor's values must be below it, and not
    negative other than -100, which losses ignore.
    """
    indices = spread(order(data, 0, 0, 1), rows)
    compare(data, ((index, read(data, [index])) for index in indices))


def spread(indices: Any, rows: int) -> list[int]:
    """Returns `rows` indices, evenly spaced from first to last."""
    step = max(len(indices) / rows, 1)
    return [indices[int(i * step)] for i in range(min(rows, len(indices)))]


def compare(data: Any, batches: Iterable[tuple[int, Any]]) -> None:
    """Checks batches [1, ...] of single samples, given with their indices, as `check` does."""
    shapes = not hasattr(data, "collate")
    classes: Mapping[str, int] = getattr(data, "classes", {})
    first: dict[str, Tensor] = {}
    for index, batch in batches:
        tensors = dict(_tensors(batch))
        first = first or tensors
        if tensors.keys() != first.keys():
            raise DataError(f"sample {index} has the tensors {_list(tensors)}, and the first has {_list(first)}.")
        for name, tensor in tensors.items():
            if problem := _problem(tensor, first[name], shapes, classes.get(name)):
                raise DataError(f"sample {index} of the training set: {name or 'its tensor'} {problem}.")


def _list(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(tensors) or "none"


def _tensors(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields (dotted name, tensor) of all tensors in a batch."""
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, (dict, list, tuple)):
        fields = getattr(batch, "_fields", None) or range(len(batch))
        for key, value in batch.items() if isinstance(batch, dict) else zip(fields, batch, strict=True):
            yield from _tensors(value, f"{name}.{key}" if name else str(key))


def _problem(tensor: Tensor, first: Tensor, shapes: bool, classes: int | None) -> str:
    if tensor.dtype != first.dtype:
        return f"is {tensor.dtype}, and that of the first sample {first.dtype}"
    if shapes and tensor.shape != first.shape:
        return f"has shape {tuple(tensor.shape[1:])}, and that of the first sample {tuple(first.shape[1:])}"
    if not torch.isfinite(tensor).all():
        index = (~torch.isfinite(tensor)).nonzero()[0]
        return f"is {tensor[tuple(index)].item()} at {index[1:].tolist()}"
    if classes is not None and ((tensor >= classes) | (tensor < 0) & (tensor != -100)).any():
        return f"has the label {tensor.max() if (tensor >= classes).any() else tensor.min()}, of {classes} classes"
    return ""
