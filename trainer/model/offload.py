"""Offloads tensors kept for the backward pass to host memory, or to a file.

The file has no name, so it always disappears with the process; it is written from the start again once all of its
tensors are released. Parameters, and views of them, stay where they are. Numbers are the same to the bit.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from trainer.compat.tensors import base, version
from trainer.config import ActivationConfig
from trainer.errors import TrainerError
from trainer.runtime.tensors import divided

SMALL = 1 << 16  # bytes; smaller tensors stay


class Offload:
    """`train.activations.offload` on one device: a context for every forward pass."""

    def __init__(self, config: ActivationConfig, device: torch.device) -> None:
        self._where, self._device = config.offload, device
        self._file = _File() if config.offload == "disk" else None

    def __call__(self) -> AbstractContextManager[object]:
        if not _moves(self._where, self._device):
            return nullcontext()
        return saved_tensors_hooks(self._pack, lambda packed: packed())

    def _pack(self, tensor: Tensor) -> _Here | _Away:
        return _Here(tensor) if _stays(tensor) else _Away(tensor.detach(), self._file)


def forgotten(config: ActivationConfig, device: torch.device) -> AbstractContextManager[object]:
    """Returns the same context for an estimate: tensors that would be elsewhere are not kept at all."""
    if not _moves(config.offload, device):
        return nullcontext()
    return saved_tensors_hooks(
        lambda t: _Here(t) if _stays(t) else partial(torch.empty_strided, t.shape, t.stride(), dtype=t.dtype),
        lambda packed: packed(),
    )


def _moves(where: str, device: torch.device) -> bool:
    return where == "disk" or (where == "cpu" and device.type != "cpu")


def _stays(tensor: Tensor) -> bool:
    is_parameter = isinstance(tensor, nn.Parameter) or isinstance(base(tensor), nn.Parameter)
    return is_parameter or tensor.nbytes < SMALL or divided(tensor)


class _Here:
    """A tensor that stays; a call returns it, unless it was changed, which autograd leaves to its hooks to check."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor.detach(), version(tensor)  # undetached, it would keep its graph alive

    def __call__(self) -> Tensor:
        if version(self._tensor) != self._version:
            raise RuntimeError("a tensor needed for the backward pass has been modified by an inplace operation.")
        return self._tensor


class _Away:
    """A tensor in host memory, or in `file`; a call returns it to the device, in the same layout."""

    def __init__(self, tensor: Tensor, file: _File | None) -> None:
        self._device, pinned = tensor.device, tensor.is_cuda
        host = torch.empty_like(tensor, device="cpu", pin_memory=pinned).copy_(tensor)
        self._back: Callable[[], Tensor] = lambda: host
        if file is not None:
            offset = file.write(_bytes_of(host))
            shape, stride, dtype, size = host.shape, host.stride(), host.dtype, host.untyped_storage().nbytes()
            self._back = lambda: _tensor_of(file.read(offset, size), shape, stride, dtype)
            weakref.finalize(self, file.release)

    def __call__(self) -> Tensor:
        return self._back().to(self._device)


class _File:
    """Regions of bytes in an unnamed file, one after another."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self._lock = threading.RLock()  # a GPU's backward pass runs in its own thread
        self._held = self.end = 0

    def write(self, data: memoryview) -> int:
        """Writes the data; returns its offset."""
        with self._lock:
            offset, self.end = self.end, self.end + len(data)
            self._held += 1
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], offset + done)
        except OSError as error:
            raise TrainerError(
                f"train.activations.offload=disk could not write to {tempfile.gettempdir()}: {error.strerror}. Set "
                "TMPDIR to a directory with room, or lower train.micro_batch_size."
            ) from error
        return offset

    def read(self, offset: int, size: int) -> bytearray:
        data, done = bytearray(size), 0
        while done < size:
            done += os.preadv(self._descriptor, [memoryview(data)[done:]], offset + done)
        return data

    def release(self) -> None:
        with self._lock:
            self._held -= 1
            if not self._held:
                self.end = 0


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    return flat.numpy().data


def _tensor_of(data: bytearray, shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).as_strided(shape, stride)
