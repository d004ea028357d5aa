"""Picks the device of a configuration, and recognises that its memory ran out."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
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
    """The device with its index: of a GPU that was given without one this process's own, as torch.cuda.memory needs it.

    CUDA is initialised by this, so that no fork of the process can use it afterwards.
    """
    import torch

    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU, in torch's CPU allocator (a plain RuntimeError) or in python."""
    said = [word for word in error.args if isinstance(word, str)]  # to spell the error out is the study's code, too
    plain = isinstance(error, RuntimeError) and any("DefaultCPUAllocator" in word for word in said)
    torch = sys.modules.get("torch")  # which has not run out of memory where it is not loaded
    return plain or isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError))
