"""Copies batches to the device, large ones on a separate stream."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.data.loader import to_device
from trainer.data.transport import map_leaves

LARGE = 1 << 20  # bytes from which a copy takes longer than changing streams for it


class DeviceCopies:
    """Copies a batch from pinned memory to `device` without waiting.

    The host launches ahead of a GPU, so a copy on another stream overlaps the computation that is still queued; kernels
    launched later wait for the copy. The memory is not reused before that computation is done with it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, batch: Any) -> Any:
        if self._device.type != "cuda" or _size(batch) < LARGE:
            return to_device(batch, self._device)
        self._stream = self._stream or torch.cuda.Stream(self._device)
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copied = to_device(batch, self._device)
        computing.wait_stream(self._stream)
        map_leaves(copied, Tensor, lambda tensor: tensor.record_stream(computing))
        return copied


def _size(batch: Any) -> int:
    """Returns the bytes of all tensors in the batch."""
    sizes: list[int] = []
    map_leaves(batch, Tensor, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)
