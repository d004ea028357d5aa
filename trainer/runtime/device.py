"""Picks the device of a configuration, and recognises that its memory ran out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch


def pick_device(name: str) -> torch.device:
    """Returns the device of that name; `auto` is the GPU if there is one."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"train.device is {name!r}, but this machine has no CUDA device: set it to cpu or auto.")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"train.device is {name!r}, but the last GPU that torch finds here is cuda:{count - 1}: set that."
        )
    return device


def numbered(device: torch.device) -> torch.device:
    """Returns the device with its index, as torch.cuda.memory needs it.

    A GPU without an index is this process's current one. This initialises CUDA, so no later fork of the process can use
    it.
    """
    import torch

    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def out_of_memory(error: BaseException) -> bool:
    """Returns True if memory ran out, on a GPU, in torch's CPU allocator (a plain RuntimeError) or in python."""
    texts = [arg for arg in error.args if isinstance(arg, str)]  # str(error) might run the study's code
    plain = isinstance(error, RuntimeError) and any("DefaultCPUAllocator" in text for text in texts)
    torch = sys.modules.get("torch")  # if it is not loaded, it has not run out of memory
    return plain or isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError))
