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
    """Returns the bytes that a step may take: the setting, else this process's share of the GPU; None for no bound."""
    if config.memory_limit is None and device.type == "cuda":
        share = torch.cuda.get_per_process_memory_fraction(device)
        return int(share * torch.cuda.get_device_properties(device).total_memory)
    return config.memory_limit


def check_bound(config: TrainConfig, device: torch.device) -> None:
    """Raises ConfigError if the micro-batch is auto and nothing bounds the memory."""
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
    """Returns the memory that micro-batches of `size` need, and what would fit; None if nothing bounds the memory.

    On a GPU without a bound in the configuration, a micro-batch that does not fit is halved as it would be once memory
    runs out, and a failed estimate is only an event, whatever the reason: if the task is at fault, its first step
    reports that better. Several ranks estimate only if configured to. Their bound is the minimum over the ranks.
    """
    auto = config.micro_batch_size == "auto"
    if ranks.ranks > 1 and config.memory_limit is None and not auto:
        return None
    check_bound(config, device)
    limit = memory_limit(config, device)
    if limit is None:
        return None
    from trainer.memory.estimate import plan  # imports torch's fake tensors, which nothing else needs

    limit, may_shrink = min(ranks.everyone(limit)), auto or config.memory_limit is None
    try:
        chosen = plan(task, config, limit, size, batch_of, may_shrink=may_shrink, halved=halved)
    except Exception as error:
        if auto or config.memory_limit is not None:
            raise
        reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        on_event("memory_estimate", step=0, reason=redacted(reason))
        return None
    on_event("memory_estimate", step=0, limit=limit, micro_batch_size=chosen.fits, **asdict(chosen.requested))
    return chosen
