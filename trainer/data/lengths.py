"""Pads samples of different lengths to one length, and batches samples of similar length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from trainer.data.view import View
from trainer.errors import DataError
from trainer.runtime.seeding import derive


def pad(
    tensors: Sequence[Tensor], value: float = 0, side: Literal["right", "left"] = "right", multiple_of: int = 1
) -> tuple[Tensor, Tensor]:
    """Returns (padded [batch, longest, ...], mask [batch, longest]) of tensors [its length, ...].

    The mask is True if there is data.
    """
    longest = -(-max(len(tensor) for tensor in tensors) // multiple_of) * multiple_of
    padded = tensors[0].new_full((len(tensors), longest, *tensors[0].shape[1:]), value)
    mask = torch.zeros(len(tensors), longest, dtype=torch.bool)
    for row, tensor in enumerate(tensors):
        columns = slice(0, len(tensor)) if side == "right" else slice(longest - len(tensor), longest)
        padded[row, columns], mask[row, columns] = tensor, True
    return padded, mask


class Padded(View):
    """Pads the batches of `data` to their longest sample; they are dicts, to which `mask` [batch, longest] is added.

    A sample is a tensor [its length, ...], then named `tokens`, or a dict; `values` maps the names to pad to their fill
    values (`{"tokens": 0, "labels": -100}`), and the mask is that of the first. The rest is collated as torch does.
    """

    def __init__(
        self,
        data: Any,
        values: Mapping[str, float] | None = None,
        side: Literal["right", "left"] = "right",
        multiple_of: int = 1,
    ) -> None:
        super().__init__(data)
        if side not in ("right", "left") or multiple_of < 1:
            raise DataError(f"Padded has side {side!r}, multiple_of {multiple_of}: give right or left, and 1 or more.")
        self.values = dict(values or {"tokens": 0})
        self.side: Literal["right", "left"] = side
        self.multiple_of = multiple_of

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self.collate([self.data[index] for index in indices])

    def collate(self, batch: list[Any]) -> dict[str, Any]:
        dicts = [sample if isinstance(sample, dict) else {"tokens": sample} for sample in batch]
        if missing := set(self.values) - set(dicts[0]):
            raise DataError(f"Padded is to pad {min(missing)!r}, and samples have {', '.join(map(str, dicts[0]))}.")
        collated = default_collate([{k: v for k, v in sample.items() if k not in self.values} for sample in dicts])
        masks = []
        for key, value in self.values.items():
            collated[key], mask = pad([sample[key] for sample in dicts], value, self.side, self.multiple_of)
            masks.append(mask)
        return collated | {"mask": masks[0]}


class Bucketed(View):
    """Orders `data` so that a window's samples are of similar length and need little padding.

    The order of an epoch is cut into buckets of `bucket` windows, each sorted by length; its windows are then shuffled.
    `lengths` gives the length of the sample at an index: a sequence, or a function if indices are not positions.
    """

    def __init__(self, data: Any, lengths: Sequence[int] | Callable[[int], int], bucket: int = 50) -> None:
        super().__init__(data)
        if bucket < 1:
            raise DataError(f"Bucketed has buckets of {bucket} windows: give 1 or more.")
        if not callable(lengths):
            self._check_by_place("lengths", lengths)
        self.length = lengths if callable(lengths) else lengths.__getitem__
        self.bucket = bucket
        self.by_batch_size = True

    def order(self, seed: int, epoch: int, batch_size: int) -> list[int]:
        indices = list(super().order(seed, epoch, batch_size))
        generator = torch.Generator().manual_seed(derive(seed, "bucket", epoch))
        reordered: list[int] = []
        for start in range(0, len(indices), self.bucket * batch_size):
            bucket = indices[start : start + self.bucket * batch_size]
            reordered += _windows([bucket[i] for i in self._by_length(bucket)], batch_size, generator)
        return reordered

    def _by_length(self, bucket: list[int]) -> list[int]:
        return np.argsort([int(self.length(index)) for index in bucket], kind="stable").tolist()


def _windows(ordered: list[int], size: int, generator: torch.Generator) -> list[int]:
    """Returns the windows of a sorted bucket, shuffled; a smaller window, cut out anywhere, stays last."""
    count, over = divmod(len(ordered), size)
    cut = int(torch.randint(count + 1, (), generator=generator)) * size
    whole = ordered[:cut] + ordered[cut + over :]
    windows = torch.randperm(count, generator=generator).tolist()
    return [index for w in windows for index in whole[w * size : (w + 1) * size]] + ordered[cut : cut + over]
