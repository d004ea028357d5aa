"""Makes the model that a fit trains."""

from __future__ import annotations

import torch
from torch import nn

from trainer.config import TrainConfig
from trainer.model.checkpointing import checkpointed
from trainer.model.init import initialise
from trainer.model.lazy import materialised
from trainer.model.precision import prepare
from trainer.runtime.seeding import derive, seed_all
from trainer.task import Task, built


def made(task: Task, config: TrainConfig, device: torch.device) -> tuple[nn.Module, int]:
    """Returns the model on its device, and its number of parameters."""
    seed_all(derive(config.seed, "init"))
    model = materialised(built(task), task, config)
    model = initialise(model, config.init, config.seed).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    return checkpointed(prepare(model, config.precision), config.activations), parameters
