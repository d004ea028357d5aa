"""The process-wide settings of a fit: put in place for it, and back afterwards, so that a warm process stays clean."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.model.precision import check, matmul_precision
from trainer.runtime.device import numbered, pick_device


@contextmanager
def runtime(config: TrainConfig) -> Iterator[torch.device]:
    """Set threads and determinism for `config`, give the device, and restore what was there before."""
    device = pick_device(config.device)
    check(config, device)
    if config.compile and device.type == "cpu":
        _check_compiler()
    threads = torch.get_num_threads()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, matmul = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    filling: Any = torch.utils.deterministic
    filled = filling.fill_uninitialized_memory
    if config.deterministic:
        # cuBLAS reads this when its first handle is made, so it has to stand before CUDA is used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.set_num_threads(config.num_threads)
        torch.use_deterministic_algorithms(config.deterministic)
        torch.backends.cudnn.benchmark = not config.deterministic
        # Writing NaN over all memory before its first use only matters to a model that reads what it never wrote, and
        # takes 2 to 4 % of a step.
        filling.fill_uninitialized_memory = False
        torch.set_float32_matmul_precision(matmul_precision(config.precision))
        yield numbered(device)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
        filling.fill_uninitialized_memory = filled
        torch.set_float32_matmul_precision(matmul)


def _check_compiler() -> None:
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise ConfigError("train.compile needs a C++ compiler: install g++, set CXX, or leave it out.") from error
