"""The process-wide settings of a fit: put in place for it, and back afterwards, so that a warm process stays clean."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.precision import check, matmul_precision
from trainer.task import Task

if TYPE_CHECKING:
    from trainer.memory import Plan
    from trainer.parallel.solo import Solo


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"train.device is {name!r}, but this machine has no CUDA device: set it to cpu or auto.")
    return torch.device(name)


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
        yield device
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


def memory_limit(config: TrainConfig, device: torch.device) -> int | None:
    """The bytes that a step may take: those configured, else this process's share of the GPU's; None for no bound."""
    if config.memory_limit is None and device.type == "cuda":
        share = torch.cuda.get_per_process_memory_fraction(device)
        return int(share * torch.cuda.get_device_properties(device).total_memory)
    return config.memory_limit


def check_bound(config: TrainConfig, device: torch.device) -> None:
    """Raise ConfigError where the micro-batch is to be what fits, and nothing bounds it."""
    if config.micro_batch_size == "auto" and config.memory_limit is None and device.type == "cpu":
        raise ConfigError("train.micro_batch_size=auto needs a bound on a CPU: set train.memory_limit, to 8GiB say.")


def memory_plan(
    task: Task,
    config: TrainConfig,
    device: torch.device,
    ranks: Solo,
    size: int,
    batch_of: Callable[[int], Any],
    on_event: Callable[..., None],
) -> Plan | None:
    """What micro-batches of `size` need of a memory that is bounded, and what would fit; None where nothing bounds it.

    On a GPU whose bound nobody has set, what does not fit is halved as it would be once memory runs out, and what
    cannot be estimated is an event; several ranks estimate where they are asked to. Their bound is the least of all.
    """
    auto = config.micro_batch_size == "auto"
    if ranks.ranks > 1 and config.memory_limit is None and not auto:
        return None
    check_bound(config, device)
    limit = memory_limit(config, device)
    if limit is None:
        return None
    from trainer.memory import plan  # torch's fake tensors, which nobody else needs

    limit = min(ranks.everyone(limit))
    try:
        found = plan(task, config, limit, size, batch_of, may_shrink=auto or config.memory_limit is None)
    except ConfigError as error:
        if auto or config.memory_limit is not None:
            raise
        on_event("memory_estimate", step=0, reason=str(error))
        return None
    on_event("memory_estimate", step=0, limit=limit, micro_batch_size=found.fits, **asdict(found.asked))
    return found


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU, in torch's CPU allocator (a plain RuntimeError) or in python."""
    said = [word for word in error.args if isinstance(word, str)]  # to spell the error out is the study's code, too
    plain = isinstance(error, RuntimeError) and any("DefaultCPUAllocator" in word for word in said)
    return plain or isinstance(error, (torch.OutOfMemoryError, MemoryError))
