"""Divides a model's parameters into groups by their weight decay and their share of the learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from trainer.config.optim import OptimConfig
from trainer.errors import ConfigError
from trainer.model.norms import NORMS


def param_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Returns the trainable parameters in the model's order, in groups with equal settings.

    A group has `params`, `weight_decay`, `lr_scale`, `vector` (norms, biases and other parameters of fewer than two
    dimensions, which do not decay unless a pattern says so and whose steps LAMB and LARS do not scale by layer) and,
    for muon, `muon`: true if Muon trains it, false if AdamW does. Raises ConfigError for a model without
    trainable parameters and for a pattern that matches none.
    """
    hyperparameters = config.hyperparameters
    parameters = list(_parameters(model))
    if not parameters:
        raise ConfigError(
            f"the model ({type(model).__name__}) has no parameter that requires a gradient: let some of it be trained."
        )
    depths = _depths([name for name, _, _ in parameters])
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    matched: set[str] = set()
    for name, p, module in parameters:
        vector = p.ndim < 2 or name.rpartition(".")[2].startswith("bias") or isinstance(module, NORMS)
        decay = 0.0 if vector else hyperparameters["weight_decay"]
        scale = config.layer_decay ** (max(depths.values()) - depths[name])
        if (special := next((group for group in config.groups if fnmatchcase(name, group.pattern)), None)) is not None:
            matched.add(special.pattern)
            scale *= special.lr_scale
            decay = decay if special.weight_decay is None else special.weight_decay
        key = {"weight_decay": decay, "lr_scale": scale, "vector": vector}
        if config.name == "muon":
            other = vector or p.ndim != 2 or isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            key["muon"] = not other and not any(fnmatchcase(name, pattern) for pattern in hyperparameters["adamw"])
        groups.setdefault(tuple(key.values()), {"params": [], **key})["params"].append(p)
    for group in config.groups:
        if group.pattern not in matched:
            some = ", ".join(name for name, _, _ in parameters[:5])
            raise ConfigError(
                f"train.optim.groups: no parameter is left for pattern {group.pattern!r}; "
                f"this model's names are such as {some}: give a pattern that matches, before those that match the same."
            )
    return sorted(groups.values(), key=lambda group: group["vector"])


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Yields (name, parameter, its module) for each that requires a gradient; a shared one once, by its first name."""
    seen: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if p.requires_grad and p not in seen:
                seen.add(p)
                yield f"{prefix}.{name}" if prefix else name, p, module


def _depths(names: list[str]) -> dict[str, int]:
    """Returns the depth of each parameter: its block's number in the order of the model.

    A block is the name up to its first number (`encoder.layers.3`), else its first part (`embed`). Parameters that
    belong to the model itself come first.
    """
    blocks: dict[str, int] = {}
    return {name: blocks.setdefault(_block(name), len(blocks)) for name in names}


def _block(name: str) -> str:
    *modules, _ = name.split(".")
    number = next((i for i, part in enumerate(modules) if part.isdigit()), 0)
    return ".".join(modules[: number + 1])
