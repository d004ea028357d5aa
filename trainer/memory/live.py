"""Counts the bytes of the storages that are alive while a step of fake tensors runs."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.compat.fake import (
    LOCAL_SCALAR,
    TorchDispatchMode,
    select_conv_backend,
)
from trainer.compat.pytree import tree_leaves
from trainer.compat.tensors import identity, sparse_parts


class Live(TorchDispatchMode):
    """Counts the current and largest number of bytes of the storages of tensors made or touched under it.

    A DTensor counts by its local part. FSDP returns memory by resizing storages, which no mode sees. `any_value`, if
    set, replaces every value that is read; fake tensors have none. `on_cpu` says that the step is for a CPU, whose
    convolutions may copy their input within an operation.
    """

    any_value: float | None = None
    on_cpu = False

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, int] = {}
        self.now = 0
        self.peak = 0

    def __enter__(self) -> Live:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = lambda storage, size: self._resized(storage, size)  # type: ignore
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore
        super().__exit__(*raised)

    def count(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                for part in _parts(tensor):
                    self._count(part.untyped_storage())

    def _count(self, storage: Any) -> None:
        key = identity(storage)
        if key in self._seen:
            return
        self._seen[key] = 0
        self._holds(key, storage.nbytes())
        weakref.finalize(storage, self._freed, key)

    def _holds(self, key: int, size: int) -> None:
        self.now += size - self._seen[key]
        self._seen[key] = size
        self.peak = max(self.peak, self.now)

    def _freed(self, key: int) -> None:
        self.now -= self._seen.pop(key)

    def _resized(self, storage: Any, size: int) -> Any:
        resized = self._resize(storage, size)
        if identity(storage) in self._seen:
            self._holds(identity(storage), size)
        return resized

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is dispatched again as operations on the local parts
        if self.any_value is not None and func is LOCAL_SCALAR:
            return self.any_value
        output = func(*args, **(kwargs or {}))
        self.count(tree_leaves(output))
        if self.on_cpu and func in _CONVOLUTIONS:
            self.peak = max(self.peak, self.now + _unfolded(func, args, output))
        return output


def _parts(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that hold the storage of a tensor; a sparse one has none itself."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []  # oneDNN's layout, which no GPU has


_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


def _unfolded(func: Any, args: Any, result: Any) -> int:
    """Returns the bytes of the copy that a convolution makes of its input within its kernel.

    It has one column of `channels * kernel` values for each position. oneDNN makes none, but torch's own kernels do,
    which compute what oneDNN cannot on this processor: fp16 without AVX512-FP16, bf16 without AVX-512.
    """
    if func is _CONVOLUTIONS[0]:
        output, (x, weight, bias, *settings) = result, args
    else:
        (output, x, weight, _, *settings), bias = args[:10], None
    backend = select_conv_backend(x, weight, bias, *settings)
    pointwise = weight[0, 0].numel() == 1 and output.shape[2:] == x.shape[2:]  # its input is read as it is
    if pointwise or backend.name not in ("Slow2d", "Slow3d"):
        return 0
    return len(x) * weight[0].numel() * output.shape[2:].numel() * x.element_size()
