"""Keeps batch norm from measuring statistics of one sample, which has no spread and which torch refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer.compat.modules import BatchNorm, buffers_in
from trainer.config import TrainConfig
from trainer.data.loader import Loader, to_device
from trainer.errors import ConfigError
from trainer.model.precision import autocast
from trainer.task import Task

_TORCHS = "Expected more than 1 value per channel"


def least_pass(model: nn.Module) -> int:
    """Returns the fewest samples in a pass of `model`: two if it has batch norm, else one."""
    return 2 if any(isinstance(module, BatchNorm) for module in model.modules()) else 1


@contextmanager
def buffers_held(model: nn.Module) -> Iterator[None]:
    """Restores the buffers after passes within the block, including those that the passes replace."""
    modules = [module for module in model.modules() if buffers_in(module)]
    kept = [
        (module, name, buffer, buffer.clone())
        for module in modules
        for name, buffer in buffers_in(module).items()
        if buffer is not None and not is_lazy(buffer)
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in kept:
            buffers_in(module)[name] = buffer.copy_(value)


def check_passes(task: Task, model: nn.Module, loader: Loader, config: TrainConfig, device: torch.device) -> None:
    """Raises ConfigError if some pass of the run would have one sample and the model cannot be trained on one.

    Batch norm of images measures a sample's positions; that of vectors fails. So a pass of one sample is tried if there
    would be one, and if the model is whole.
    """
    sampler = loader.sampler
    if sampler.least == 1 or config.parallel.parts or config.parallel.pipeline > 1:
        return
    if (single := sampler.single(sampler.micro_batch_size)) is None:
        return
    model.train()
    try:
        with torch.no_grad(), buffers_held(model), autocast(config.precision, device):
            task.loss(model, to_device(loader.first(1), device))
    except ValueError as error:
        if not str(error).startswith(_TORCHS):
            raise
        batch_size, samples = single
        ranks = f", {sampler.shares} ranks" if sampler.shares > 1 else ""
        raise ConfigError(
            f"batch norm cannot be trained on one sample, which has no spread: of the {sampler.size} samples of the "
            f"training set some window holds {samples}, and a pass of it one (train.batch_size={batch_size}, "
            f"micro-batches of {sampler.micro_batch_size}{ranks}); set train.drop_last=true, which leaves out a last "
            "window that is not full, another train.batch_size, or micro-batches of 3 or more."
        ) from error
