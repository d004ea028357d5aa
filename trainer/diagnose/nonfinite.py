"""Finding out where numbers went bad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def first_nonfinite(model: nn.Module, forward: Callable[[], Any]) -> str:
    """In words, the first thing of `model` that is not finite: a parameter, else the first output of a module in a
    run of `forward`, else a gradient."""
    for name, p in model.named_parameters():
        if not _finite(p):
            return f"parameter {name} is not finite"
    bad: list[str] = []
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if not _finite(output):
            bad.append(names[module])

    hooks = [module.register_forward_hook(look) for module in names]
    try:
        with torch.no_grad():
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    if bad:
        return f"the output of module {bad[0]} is the first that is not finite"
    for name, p in model.named_parameters():
        if p.grad is not None and not _finite(p.grad):
            return f"the gradient of parameter {name} is the first that is not finite, the model's outputs are finite"
    return "the model's outputs are finite, the loss is not"


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(torch.isfinite(value).all())
    if isinstance(value, dict):
        return all(_finite(v) for v in value.values())
    return all(_finite(v) for v in value) if isinstance(value, (list, tuple)) else True
