"""Sends batches from one process to another, through anonymous memory whose descriptor is passed along.

Torch passes a descriptor over a second connection to the sender, which must then answer: a batch whose worker hung or
died after sending it cannot be received, or is waited for forever. Here the receiver has all of a batch once its
message arrives; and as the memory has no name, nothing is left over, whichever process is killed.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_HEADER = struct.Struct("<QQ")  # start and end of the pickle
_ALIGNMENT = 64


def map_leaves(batch: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Returns the batch with every `kind` in its tuples, lists and dicts replaced by `function` of it."""
    if isinstance(batch, kind):
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_leaves(value, kind, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(value, kind, function) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map_leaves(value, kind, function) for value in batch)
    return batch


@dataclass(frozen=True)
class _Slot:
    """A tensor's position in the memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


def send(sender: socket.socket, batch: Any) -> None:
    """Sends a batch; raises before anything is sent if it cannot be pickled."""
    tensors: list[tuple[int, Tensor]] = []
    size = 0

    def to_slot(tensor: Tensor) -> Any:
        nonlocal size
        plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided
        if not plain or tensor.requires_grad or tensor.numel() == 0:
            return tensor  # goes with the pickle
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        slot = _Slot(tensor.dtype, tuple(tensor.shape), size)
        tensors.append((size, tensor))
        size += tensor.numel() * tensor.element_size()
        return slot

    pickled = pickle.dumps(map_leaves(batch, Tensor, to_slot), protocol=pickle.HIGHEST_PROTOCOL)
    descriptor = anonymous()
    try:
        os.ftruncate(descriptor, size + len(pickled))
        with mmap.mmap(descriptor, size + len(pickled)) as memory:
            for offset, tensor in tensors:
                # `view` would refuse a conjugate or negative tensor; copy_ resolves it
                torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset).copy_(
                    tensor.reshape(-1)
                )
            memory[size:] = pickled
        socket.send_fds(sender, [_HEADER.pack(size, size + len(pickled))], [descriptor])
    finally:
        os.close(descriptor)


def receive(receiver: socket.socket) -> Any:
    """Returns the next batch, whose tensors lie in the received memory. Raises EOFError if the sender is gone."""
    header, descriptors, *_ = socket.recv_fds(receiver, _HEADER.size, 1)
    if not descriptors:
        raise EOFError
    begin, end = _HEADER.unpack(header)
    try:  # `mmap` would keep a descriptor open for as long as any tensor of the batch lives
        memory = torch.from_file(f"/dev/fd/{descriptors[0]}", shared=True, size=end, dtype=torch.uint8)
    finally:
        os.close(descriptors[0])

    def tensor(slot: _Slot) -> Tensor:
        stop = slot.offset + torch.Size(slot.shape).numel() * slot.dtype.itemsize
        return memory[slot.offset : stop].view(slot.dtype).view(slot.shape)

    return map_leaves(pickle.loads(memory[begin:end].numpy().data), _Slot, tensor)


def send_descriptor(sender: socket.socket, descriptor: int) -> None:
    """Passes an open file of the sender to the receiver."""
    socket.send_fds(sender, [b"d"], [descriptor])


def receive_descriptor(receiver: socket.socket) -> int:
    """Returns the descriptor that was sent; raises EOFError if the sender is gone."""
    _, descriptors, *_ = socket.recv_fds(receiver, 1, 1)
    if not descriptors:
        raise EOFError
    return descriptors[0]


def anonymous() -> int:
    """Returns a descriptor of a new unnamed file: in memory on Linux, else in the directory for temporary files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("batch")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
