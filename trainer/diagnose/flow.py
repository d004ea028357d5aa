"""Measures gradient flow, update ratios and dead units, layer by layer, over a few optimizer steps.

Only the update ratio tells in which direction a learning rate is off or, without a ratio, that a step is not finite: so
no two checks contradict each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compat.modules import ConvNd
from trainer.finding import Finding, names, unmeasured

# An optimizer's usual step changes weights by about a thousandth of their size; far less and they hardly learn, far
# more and they are thrown about (Karpathy 2015, CS231n notes "Learning: ratio of updates:weights").
SMALL_UPDATE, LARGE_UPDATE = 1e-5, 3e-2
VANISHING = 1e-3  # of the largest layer's gradient per weight
MANY_DEAD = 0.2
CHECKS = ("gradient flow", "update ratio", "dead units")


@dataclass(frozen=True)
class Layer:
    """One module with its own parameters.

    Norms are root mean squares over its weights, so that layers compare; they and the ratio are means over the steps.
    """

    name: str
    weight: float
    gradient: float
    update_ratio: float  # of one optimizer step: rms of the change over rms of the weights
    dead: float | None  # share of the units between it and the next such module that no sample activates
    activation: str = ""  # the kind of module that activates them
    output_mean: float | None = None  # of its outputs in all passes, if they are one tensor
    output_std: float | None = None


def gradient_flow(model: nn.Module, step: Callable[[], object], steps: int = 1) -> list[Layer]:
    """Measures each layer over `steps` calls of `step`, which takes an optimizer step and leaves the gradients.

    A unit is a feature (last dimension) of a linear layer's output or a channel (dimension 1) of a convolution's. It
    counts as dead if an activation module gives exactly 0 for it throughout.
    """
    alive: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    hooks = _watch_activations(model, alive) + _watch_outputs(model, moments)
    owners = {name: [p for p in module.parameters(False) if p.requires_grad] for name, module in model.named_modules()}
    seen: dict[str, list[tuple[float, float, float]]] = {}
    try:
        for _ in range(steps):
            before = {name: [p.detach().clone() for p in params] for name, params in owners.items()}
            step()
            for name, params in owners.items():
                if grads := [p.grad for p in params if p.grad is not None]:
                    weight = _rms(before[name])
                    update = _rms([p.detach() - old for p, old in zip(params, before[name], strict=True)])
                    seen.setdefault(name, []).append((weight, _rms(grads), update / max(weight, 1e-12)))
    finally:
        for hook in hooks:
            hook.remove()
    behind = _behind(model, alive)
    layers = []
    for name, rows in seen.items():
        weight, gradient, ratio = (fmean(column) for column in zip(*rows, strict=True))
        dead, kind = behind.get(name, (None, ""))
        mean, std = _mean_and_std(moments.get(name))
        layers.append(Layer(name or type(model).__name__, weight, gradient, ratio, dead, kind, mean, std))
    return layers


def _watch_activations(model: nn.Module, alive: dict[str, Tensor]) -> list[Any]:
    """Returns hooks that record, for each activation module, which of its units any sample has activated."""

    def watch(name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            units = 1 if output.ndim > 3 else output.ndim - 1
            active = (output.detach() != 0).movedim(units, 0).flatten(1).any(1)
            alive[name] = active | alive[name] if name in alive else active

        return look

    activations = [(n, m) for n, m in model.named_modules() if type(m).__module__ == "torch.nn.modules.activation"]
    return [m.register_forward_hook(watch(n)) for n, m in activations if not isinstance(m, nn.MultiheadAttention)]


def _watch_outputs(model: nn.Module, moments: dict[str, Tensor]) -> list[Any]:
    """Returns hooks that sum, for each module with its own parameters, its outputs' count, values and squares."""

    def watch(name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                x = output.detach().double()
                now = torch.stack([torch.full_like(x.sum(), x.numel()), x.sum(), x.square().sum()])
                moments[name] = moments[name] + now if name in moments else now

        return look

    owners = [(name, module) for name, module in model.named_modules() if [*module.parameters(False)]]
    return [module.register_forward_hook(watch(name)) for name, module in owners]


def _mean_and_std(moments: Tensor | None) -> tuple[float | None, float | None]:
    if moments is None or not moments[0]:
        return None, None
    count, total, squares = moments.tolist()
    return total / count, max(squares / count - (total / count) ** 2, 0.0) ** 0.5


def _behind(model: nn.Module, alive: dict[str, Tensor]) -> dict[str, tuple[float, str]]:
    """Returns module with weights -> (share of dead units of the activation that follows it, its kind), by name."""
    by_module: dict[str, tuple[float, str]] = {}
    last = ""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, ConvNd)):
            last = name
        elif name in alive and last:
            by_module[last] = 1 - alive[name].float().mean().item(), type(module).__name__
    return by_module


def _rms(tensors: Sequence[Tensor]) -> float:
    flat = torch.cat([t.reshape(-1).double() for t in tensors]) if tensors else torch.zeros(1)
    return flat.square().mean().sqrt().item()


def findings(layers: Sequence[Layer]) -> list[Finding]:
    """Returns the findings on gradient flow, update ratios and dead units."""
    if not layers:
        return [unmeasured(check, "no layer has been given a gradient") for check in CHECKS]
    return [_flow(layers), _updates(layers), _dead(layers)]


def _flow(layers: Sequence[Layer]) -> Finding:
    ranked = sorted(layers, key=lambda layer: layer.gradient)
    weakest, strongest = ranked[0], ranked[-1]
    ratio = weakest.gradient / max(strongest.gradient, 1e-300)
    figure = (
        f"the gradient of {weakest.name} is {ratio:.2g} of that of {strongest.name} (it vanishes under {VANISHING:g})"
    )
    vanishing = [layer.name for layer in layers if layer.gradient < VANISHING * strongest.gradient]
    if not vanishing and strongest.gradient > 0:
        return Finding(CHECKS[0], "healthy", figure, ratio)
    return Finding(
        CHECKS[0],
        "vanishing",
        figure,
        ratio,
        f"gradients vanish in {names(vanishing or [layer.name for layer in layers])}: add normalisation or residual "
        "connections, or change the initialisation; a layer that is frozen on purpose is best told so (requires_grad).",
    )


def _updates(layers: Sequence[Layer]) -> Finding:
    ratio = median(layer.update_ratio for layer in layers)
    figure = (
        f"a step changes a layer by {ratio:.2g} of its size, the median of {len(layers)} "
        f"(usual: {SMALL_UPDATE:g} to {LARGE_UPDATE:g})"
    )
    if ratio > LARGE_UPDATE:
        return Finding(CHECKS[1], "too large", figure, ratio, "lower train.optim.lr, by half to begin with.")
    if ratio < SMALL_UPDATE:
        return Finding(CHECKS[1], "too small", figure, ratio, "raise train.optim.lr; `hpo lr-find` suggests one.")
    return Finding(CHECKS[1], "healthy", figure, ratio)


def _dead(layers: Sequence[Layer]) -> Finding:
    watched = {layer.name: layer.dead for layer in layers if layer.dead is not None}
    if not watched:
        return unmeasured(CHECKS[2], "no activation module of torch.nn follows a linear or convolutional layer")
    worst = max(watched, key=lambda name: watched[name])
    share = watched[worst]
    figure = f"{share:.0%} of the units behind {worst} are never active (too many over {MANY_DEAD:.0%})"
    many = [name for name, dead in watched.items() if dead > MANY_DEAD]
    if not many:
        return Finding(CHECKS[2], "healthy", figure, share)
    kinds = sorted({layer.activation for layer in layers if layer.name in many})
    other = "use GELU in place of ReLU" if kinds == ["ReLU"] else f"normalise what {' and '.join(kinds)} is given"
    return Finding(
        CHECKS[2],
        "dead units",
        figure,
        share,
        f"units behind {names(many)} have died: warm the learning rate up (train.schedule.warmup_steps), take the one "
        f"that `hpo lr-find` suggests, or {other}.",
    )
