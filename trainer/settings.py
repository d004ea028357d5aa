"""Applies the process-wide settings of a fit, and restores the previous ones, so that a warm process stays clean."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from trainer.compat.compiler import has_cpp_compiler
from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.model.compiled import unlimited
from trainer.model.precision import check, matmul_precision
from trainer.runtime.device import numbered, pick_device

_DEFAULT, _WARN, _ERROR = 0, 1, 2  # torch.set_deterministic_debug_mode's
_COMPILERS = "TORCHINDUCTOR_DETERMINISTIC"


@contextmanager
def runtime(config: TrainConfig) -> Iterator[torch.device]:
    """Sets threads and determinism for `config`, yields the device, and restores the previous settings."""
    device = pick_device(config.device)
    check(config, device)
    if config.compile and device.type == "cpu":
        _check_compiler()
    threads = torch.get_num_threads()
    before, compilers = torch.get_deterministic_debug_mode(), os.environ.get(_COMPILERS)
    benchmark, matmul = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    filling: Any = torch.utils.deterministic
    filled = filling.fill_uninitialized_memory
    if config.deterministic:
        # cuBLAS reads this when its first handle is made, so it must be set before CUDA is used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.set_num_threads(config.num_threads)
        _set_deterministic(_ERROR if config.deterministic else _DEFAULT, bool(config.compile))
        torch.backends.cudnn.benchmark = not config.deterministic
        # Writing NaN over all memory before its first use only matters to a model that reads what it never wrote, and
        # takes 2 to 4 % of a step.
        filling.fill_uninitialized_memory = False
        torch.set_float32_matmul_precision(matmul_precision(config.precision))
        device = numbered(device)
        # Calls without a device concern the current one: seeds, waits, memory.
        current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with current, unlimited() if config.compile else nullcontext():
            yield device
    finally:
        torch.set_num_threads(threads)
        _set_deterministic(before, bool(config.compile))
        os.environ.pop(_COMPILERS, None)  # the task may have removed it
        os.environ |= {} if compilers is None else {_COMPILERS: compilers}
        torch.backends.cudnn.benchmark = benchmark
        filling.fill_uninitialized_memory = filled
        torch.set_float32_matmul_precision(matmul)


def _set_deterministic(mode: int, compiles: bool) -> None:
    """Does the same as torch.use_deterministic_algorithms, but imports torch's compiler only if it is used.

    A compiler that is imported later, by a study's own torch.compile, reads the environment.
    """
    os.environ[_COMPILERS] = "1" if mode != _DEFAULT else "0"
    if compiles or "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(mode != _DEFAULT, warn_only=mode == _WARN)
    else:
        torch.set_deterministic_debug_mode(mode)


def _check_compiler() -> None:
    if not has_cpp_compiler():
        raise ConfigError("train.compile needs a C++ compiler: install g++, set CXX, or leave it out.")
