"""Gradient flow, update ratios and dead units, layer by layer, over a few windows of one model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.gradients import accumulate
from trainer.task import Loss

LossOf = Callable[[nn.Module, Any], Loss]

# An optimizer's usual step changes weights by about a thousandth of their size; far less and they hardly learn, far
# more and they are thrown about (Karpathy 2015, CS231n notes "Learning: ratio of updates:weights").
SMALL_UPDATE, LARGE_UPDATE = 1e-5, 3e-2
VANISHING = 1e-3  # of the largest layer's gradient per weight
MANY_DEAD = 0.2


@dataclass(frozen=True)
class Layer:
    """One module with parameters of its own. Norms are root mean squares over its weights, so layers compare."""

    name: str
    weight: float
    gradient: float
    update_ratio: float  # of one optimizer step: rms of the change over rms of the weights
    dead: float | None  # share of the units behind it, up to the next such module, that no sample activates


def gradient_flow(model: nn.Module, optimizer: Optimizer, loss_of: LossOf, batches: Sequence[Any]) -> list[Layer]:
    """Measure each layer on the window that `batches` make; neither `model` nor `optimizer` is changed.

    A unit is a feature (last dimension) of a linear layer's output or a channel (dimension 1) of a convolution's. It
    counts as dead if an activation module gives exactly 0 for it throughout.
    """
    model, optimizer = copy.deepcopy((model, optimizer))
    alive: dict[str, Tensor] = {}
    hooks = _watch_activations(model, alive)
    model.train()
    optimizer.zero_grad()
    window = accumulate(batches, lambda _, batch: loss_of(model, batch))
    for hook in hooks:
        hook.remove()
    owners = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters(False))}
    params = {name: [p for p in module.parameters(False) if p.grad is not None] for name, module in owners.items()}
    grads = {name: [p.grad for p in group if p.grad is not None] for name, group in params.items()}
    for grad in (grad for group in grads.values() for grad in group):
        grad.div_(window.count)
    gradients = {name: _rms(group) for name, group in grads.items()}
    before = {name: [p.detach().clone() for p in group] for name, group in params.items()}
    optimizer.step()
    dead = _behind(model, alive)
    return [
        Layer(
            name=name,
            weight=(weight := _rms(before[name])),
            gradient=gradients[name],
            update_ratio=_rms([p.detach() - b for p, b in zip(group, before[name], strict=True)]) / max(weight, 1e-12),
            dead=dead.get(name),
        )
        for name, group in params.items()
        if group
    ]


def _watch_activations(model: nn.Module, alive: dict[str, Tensor]) -> list[Any]:
    """Hooks that note, for each activation module, which of its units any sample has activated."""

    def watch(name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            units = 1 if output.ndim > 3 else output.ndim - 1
            active = (output.detach() != 0).movedim(units, 0).flatten(1).any(1)
            alive[name] = active | alive[name] if name in alive else active

        return look

    activations = [(n, m) for n, m in model.named_modules() if type(m).__module__ == "torch.nn.modules.activation"]
    return [m.register_forward_hook(watch(n)) for n, m in activations if not isinstance(m, nn.MultiheadAttention)]


def _behind(model: nn.Module, alive: dict[str, Tensor]) -> dict[str, float]:
    """Name of the module with weights -> the share of dead units of the activation that follows it."""
    found, last = {}, ""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
            last = name
        elif name in alive and last:
            found[last] = 1 - alive[name].float().mean().item()
    return found


def _rms(tensors: Sequence[Tensor]) -> float:
    flat = torch.cat([t.reshape(-1).double() for t in tensors]) if tensors else torch.zeros(1)
    return flat.square().mean().sqrt().item()


def advice(layers: Sequence[Layer]) -> list[str]:
    """What to change, a sentence for each thing found; empty where nothing is."""
    found = []
    largest = max((layer.gradient for layer in layers), default=0.0)
    vanishing = [layer.name for layer in layers if 0 <= layer.gradient < VANISHING * largest]
    if vanishing:
        found.append(
            f"gradients vanish in {_names(vanishing)} (under {VANISHING:g} of the largest layer's): "
            "add normalisation or residual connections, or change the initialisation."
        )
    small = [layer.name for layer in layers if layer.update_ratio < SMALL_UPDATE]
    large = [layer.name for layer in layers if layer.update_ratio > LARGE_UPDATE]
    if small and len(small) > len(layers) / 2:
        found.append(f"most layers change by under {SMALL_UPDATE:g} of their size a step: raise train.optim.lr.")
    if large and len(large) > len(layers) / 2:
        found.append(f"most layers change by over {LARGE_UPDATE:g} of their size a step: lower train.optim.lr.")
    dead = [layer.name for layer in layers if layer.dead is not None and layer.dead > MANY_DEAD]
    if dead:
        found.append(
            f"over {MANY_DEAD:.0%} of the units behind {_names(dead)} are never active: lower train.optim.lr, "
            "warm it up, or use GELU in place of ReLU."
        )
    return found


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
