"""Makes the model that a fit trains, from the task's own to what this rank holds of it."""

from __future__ import annotations

import torch
from torch import nn

from trainer.config import TrainConfig
from trainer.model.checkpointing import checkpointed
from trainer.model.init import initialise
from trainer.model.lazy import materialised
from trainer.model.precision import prepare
from trainer.ranks import Solo
from trainer.runtime.seeding import derive, seed_all
from trainer.task import Task, built


def made(task: Task, config: TrainConfig, device: torch.device, ranks: Solo) -> tuple[nn.Module, int]:
    """Returns the model on its device, as this rank holds it, and how many parameters the whole of it has."""
    seed_all(derive(config.seed, "init"))
    model = materialised(built(task), task, config)
    model = initialise(model, config.init, config.seed).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    model = checkpointed(prepare(model, config.precision), config.activations)
    return ranks.prepare(model, task), parameters
