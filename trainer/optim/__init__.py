"""Optimizers by name: one literal table."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from trainer.config import OptimConfig
from trainer.errors import ConfigError

# What a field of OptimConfig that is None means.
DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "weight_decay": 0.01, "betas": (0.9, 0.999)},
    "sgd": {"lr": 0.1, "weight_decay": 1e-4},
}


def learning_rate(config: OptimConfig) -> float:
    """The peak learning rate: the one given, else the optimizer's own."""
    return DEFAULTS[config.name]["lr"] if config.lr is None else config.lr


# Modules whose own parameters are never decayed, whatever their shape.
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in the model's order: those that decay, and norms, biases and other vectors."""
    decay: dict[nn.Parameter, None] = {}
    rest: dict[nn.Parameter, None] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            kept = p.ndim < 2 or name.startswith("bias") or isinstance(module, NORMS)
            if p.requires_grad and p not in decay and p not in rest:
                (rest if kept else decay)[p] = None
    groups = [{"params": [*decay], "weight_decay": weight_decay}, {"params": [*rest], "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _adamw(groups: list[dict[str, Any]], c: OptimConfig) -> Optimizer:
    """Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2."""
    return AdamW(groups, lr=learning_rate(c), betas=c.betas or DEFAULTS["adamw"]["betas"], eps=c.eps, fused=True)


def _sgd(groups: list[dict[str, Any]], c: OptimConfig) -> Optimizer:
    """Sutskever et al. 2013, with torch's v = momentum * v + g; decay enters the gradient."""
    optimizer = SGD(groups, lr=learning_rate(c), momentum=c.momentum, nesterov=c.nesterov, fused=True)
    if c.momentum:
        # v = 0 makes the first step what torch's own first step is, v = g. Torch would leave v uninitialised where
        # the very first step is one that `found_inf` skips.
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return optimizer


_BUILD = {"adamw": _adamw, "sgd": _sgd}


def build(config: OptimConfig, model: nn.Module) -> Optimizer:
    """The optimizer `config` names, over the parameters of `model` that require a gradient."""
    decay = DEFAULTS[config.name]["weight_decay"] if config.weight_decay is None else config.weight_decay
    groups = param_groups(model, decay)
    if not groups:
        raise ConfigError(f"the model ({type(model).__name__}) has no parameter that requires a gradient.")
    return _BUILD[config.name](groups, config)
