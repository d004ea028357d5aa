"""Defines the interface of a data set, and the base of views on another one.

A data set is map-style: an epoch takes `len(data)` samples, and `data[index]` is one of them, or
`data.__getitems__(indices)` a whole batch (a list counts as samples still to be collated). It may also have

    order(seed, epoch, batch_size) -> Sequence[int]   the indices that an epoch visits, always len(data) of them and
                                                      a function of its arguments; else a permutation of range(len)
    collate(samples) -> batch                         else torch's default_collate, with tuples in place of lists
    draws = False                                     a promise that reading it draws no random number
    by_batch_size = True                              its order depends on the batch size
    one_batch_size = True                             its samples continue from epoch to epoch, for one batch size
                                                      alone: refused if batches grow
    own_indices = True                                its indices are not 0 to len - 1: views by position are refused

The data set defines the meaning of an index: it need only take the ones that its `order` gives. So an order can encode
more than a position (which source, which pass over it), and a resumed run still needs only (epoch, position).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from trainer.errors import DataError
from trainer.runtime.seeding import shuffled


def order(data: Any, seed: int, epoch: int, batch_size: int) -> Sequence[int]:
    """Returns the indices of `data` in the order in which epoch `epoch` visits them."""
    if not hasattr(data, "order"):
        return shuffled(seed, epoch, len(data))
    indices = data.order(seed, epoch, batch_size)
    if isinstance(indices, (np.ndarray, torch.Tensor)):
        indices = indices.tolist()  # plain numbers, since seeds are derived from their text
    if len(indices) != len(data):
        raise DataError(
            f"the order of {type(data).__name__} has {len(indices)} indices in epoch {epoch} and its length is "
            f"{len(data)}: an epoch must have the same number of steps each time."
        )
    return indices


def collate(data: Any) -> Callable[[list[Any]], Any]:
    """Returns the function that makes a batch of a list of samples of `data`."""
    return getattr(data, "collate", collated)


def collated(samples: list[Any]) -> Any:
    """Returns torch's default batch, as a tuple if that is a list, which would count as samples."""
    batch = default_collate(samples)
    return tuple(batch) if isinstance(batch, list) else batch


def read(data: Any, indices: Sequence[int]) -> Any:
    """Returns the samples of `data` at `indices`, as a batch."""
    if not hasattr(data, "__getitems__"):
        return collate(data)([data[index] for index in indices])
    batch = data.__getitems__(indices)
    return collate(data)(batch) if isinstance(batch, list) else batch


def samples(data: Any, indices: Sequence[int]) -> list[Any]:
    """Returns the samples of `data` at `indices`, one by one."""
    batch = data.__getitems__(indices) if hasattr(data, "__getitems__") else None
    return batch if isinstance(batch, list) else [data[index] for index in indices]


class View:
    """A view of another data set, `data`, unchanged except where a subclass overrides it."""

    def __init__(self, data: Any) -> None:
        if len(data) == 0:
            raise DataError(f"{type(self).__name__} was given an empty data set ({type(data).__name__}).")
        self.data = data
        self.draws = getattr(data, "draws", True)
        self.own_indices = getattr(data, "own_indices", False)
        self.by_batch_size = getattr(data, "by_batch_size", False)
        self.one_batch_size = getattr(data, "one_batch_size", False)

    def _check_by_place(self, what: str, values: Sequence[Any]) -> None:
        """Raises DataError unless `values` has one value for each position in `data`."""
        name = type(self).__name__
        if self.own_indices:
            raise DataError(
                f"{name} was given {what} by place, and {type(self.data).__name__} numbers its samples in a way of its "
                f"own: put {name} around what is inside it."
            )
        if len(values) != len(self.data):
            raise DataError(f"{name} was given {len(values)} {what} for {len(self.data)} samples.")

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return read(self.data, indices)

    def order(self, seed: int, epoch: int, batch_size: int) -> Sequence[int]:
        return order(self.data, seed, epoch, batch_size)

    def collate(self, batch: list[Any]) -> Any:
        return collate(self.data)(batch)
