"""Evaluates a model within its training: references, teachers and averages neither drop out nor take gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def as_evaluated(model: nn.Module) -> Iterator[None]:
    """Within it the model is in eval mode and nothing takes a gradient; after it each module has its mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
