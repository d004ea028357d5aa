"""Evaluates a model during its training: references, teachers and averages, without dropout or gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def as_evaluated(model: nn.Module) -> Iterator[None]:
    """Puts the model in eval mode without gradients for the block, and then restores each module's mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
