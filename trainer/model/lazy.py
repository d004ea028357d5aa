"""Determines the sizes of lazy layers (`nn.LazyLinear`) by one pass over the first batch, before all else."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from trainer.compat.modules import Norm, buffers_in, parameters_in
from trainer.config import TrainConfig
from trainer.data.loader import Fetch, training_set
from trainer.data.view import order
from trainer.errors import ConfigError
from trainer.model.batch_norm import buffers_held
from trainer.runtime.seeding import derive, seed_all
from trainer.task import Task


def materialised(model: nn.Module, task: Task, config: TrainConfig) -> nn.Module:
    """Returns the same model, on the CPU, with lazy layers sized by the first batch.

    Their random draws depend on the seed alone. Raises ConfigError if the task's loss leaves a lazy layer out.
    """
    if not (layers := _lazy(model)):
        return model
    norms = [layer for layer in layers.values() if isinstance(layer, Norm)]
    batch = _first(task, config)
    for training in (False, True):  # in training mode only if evaluation misses layers: it may change attributes
        if _lazy(model):
            seed_all(derive(config.seed, "lazy"))
            with buffers_held(model):
                task.loss(model.train(training), batch)
    for norm in norms:
        norm.reset_running_stats()
    if layers := _lazy(model):
        raise ConfigError(
            f"{type(model).__name__} has a lazy layer {next(iter(layers))!r} that the loss of {type(task).__name__} "
            "does not call, so that its size stays unknown: give it its size, or leave it out."
        )
    return model.train()


def _lazy(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers whose sizes are not known yet, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(t is not None and is_lazy(t) for t in (*parameters_in(module).values(), *buffers_in(module).values()))
    }


def _first(task: Task, config: TrainConfig) -> Any:
    seed_all(derive(config.seed, "data"))
    data = training_set(task)
    size = config.fixed_micro_batch_size or config.batch_size
    return Fetch(task, data, config)((0, list(order(data, config.seed, 0, config.batch_size)[:size])))
