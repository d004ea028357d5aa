"""Bounds the memory of a step, and chooses the micro-batch that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.redaction import redacted
from trainer.task import Task

if TYPE_CHECKING:
    from trainer.memory.estimate import Plan
    from trainer.ranks import Solo


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
    halved: Callable[[int], int],
) -> Plan | None:
    """What micro-batches of `size` need of a memory that is bounded, and what would fit; None where nothing bounds it.

    On a GPU whose bound nobody has set, what does not fit is halved as it would be once memory runs out, and what
    cannot be estimated is an event, whatever the reason: if the task is at fault, its first step says so better.
    Several ranks estimate where they are asked to. Their bound is the least of all.
    """
    auto = config.micro_batch_size == "auto"
    if ranks.ranks > 1 and config.memory_limit is None and not auto:
        return None
    check_bound(config, device)
    limit = memory_limit(config, device)
    if limit is None:
        return None
    from trainer.memory.estimate import plan  # torch's fake tensors, which nobody else needs

    limit, may_shrink = min(ranks.everyone(limit)), auto or config.memory_limit is None
    try:
        found = plan(task, config, limit, size, batch_of, may_shrink=may_shrink, halved=halved)
    except Exception as error:
        if auto or config.memory_limit is not None:
            raise
        reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        on_event("memory_estimate", step=0, reason=redacted(reason))
        return None
    on_event("memory_estimate", step=0, limit=limit, micro_batch_size=found.fits, **asdict(found.asked))
    return found
