"""The process-wide settings of a fit: put in place for it, and back afterwards, so that a warm process stays clean."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from trainer.config import TrainConfig
from trainer.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"train.device is {name!r}, but this machine has no CUDA device: set it to cpu or auto.")
    return torch.device(name)


def autocast(config: TrainConfig, device: torch.device) -> AbstractContextManager[object]:
    """The context of every forward pass: bf16 where asked for; its own casts are then cached per forward pass."""
    if config.precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


@contextmanager
def runtime(config: TrainConfig) -> Iterator[torch.device]:
    """Set threads and determinism for `config`, give the device, and restore what was there before."""
    device = pick_device(config.device)
    threads = torch.get_num_threads()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if config.deterministic:
        # cuBLAS reads this when its first handle is made, so it has to stand before CUDA is used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.set_num_threads(config.num_threads)
        torch.use_deterministic_algorithms(config.deterministic)
        torch.backends.cudnn.benchmark = not config.deterministic
        yield device
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU, in torch's CPU allocator (a plain RuntimeError) or in python."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)
