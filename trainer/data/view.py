"""Defines the interface of a data set, and the base of those that show another one differently.

A data set is map-style: an epoch takes `len(data)` samples, and `data[index]` is one of them, or
`data.__getitems__(indices)` a whole batch (a list counts as samples still to be collated). It may also have

    order(seed, epoch, batch_size) -> Sequence[int]   the indices that an epoch visits, always len(data) of them and
                                                      a function of its arguments; else a permutation of range(len)
    collate(samples) -> batch                         else torch's default_collate, with tuples in place of lists
    draws = False                                     a promise that reading it draws no random number
    by_batch_size = True                              its order goes by the batch size
    one_batch_size = True                             what it gives goes on from epoch to epoch, and for one batch size
                                                      alone: refused where batches grow
    own_indices = True                                its indices are not 0 to len - 1: what goes by place is refused

What an index means is the data set's own affair: it need only take those that its `order` gives. So an order can say
more than a place (which source, which pass over it), and a resumed run still needs no more than (epoch, position).
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
    """The indices of `data` in the order in which epoch `epoch` visits them."""
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
    """What makes a batch of a list of samples of `data`."""
    return getattr(data, "collate", _collated)


def _collated(samples: list[Any]) -> Any:
    """Torch's default, but for pairs and the like a tuple: a list is taken for samples by whoever shows this batch."""
    batch = default_collate(samples)
    return tuple(batch) if isinstance(batch, list) else batch


def read(data: Any, indices: Sequence[int]) -> Any:
    """The samples of `data` at `indices`, as a batch."""
    if not hasattr(data, "__getitems__"):
        return collate(data)([data[index] for index in indices])
    batch = data.__getitems__(indices)
    return collate(data)(batch) if isinstance(batch, list) else batch


def samples(data: Any, indices: Sequence[int]) -> list[Any]:
    """The samples of `data` at `indices`, one by one."""
    batch = data.__getitems__(indices) if hasattr(data, "__getitems__") else None
    return batch if isinstance(batch, list) else [data[index] for index in indices]


class View:
    """A data set that shows another one, `data`: what a subclass does not change is as it is there."""

    def __init__(self, data: Any) -> None:
        if len(data) == 0:
            raise DataError(f"{type(self).__name__} was given an empty data set ({type(data).__name__}).")
        self.data = data
        self.draws = getattr(data, "draws", True)
        self.own_indices = getattr(data, "own_indices", False)
        self.by_batch_size = getattr(data, "by_batch_size", False)
        self.one_batch_size = getattr(data, "one_batch_size", False)

    def _check_by_place(self, what: str, values: Sequence[Any]) -> None:
        """Raise DataError unless `values` can be one for each place in `data`."""
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
