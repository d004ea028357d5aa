"""Adapts torch's optimizers whose arguments differ from ours. Adam and AdamW are used as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD, Adafactor, Optimizer, RAdam


def sgd(groups: list[dict[str, Any]], **hyperparameters: Any) -> Optimizer:
    """Returns SGD of Sutskever et al. 2013, with torch's v = momentum * v + g; decay enters the gradient."""
    optimizer = SGD(groups, **hyperparameters)
    if hyperparameters["momentum"]:
        # With v = 0 the first step is torch's first step, v = g. Torch would leave v uninitialised if `found_inf`
        # skipped the very first step.
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return optimizer


def adafactor(groups: list[dict[str, Any]], *, clip_threshold: float, **hyperparameters: Any) -> Optimizer:
    """Returns Adafactor of Shazeer & Stern 2018, arXiv 1804.04235.

    Its lr is the cap on the relative step (the paper's 0.01).
    """
    return Adafactor(groups, d=clip_threshold, eps=(None, 1e-3), **hyperparameters)


def radam(groups: list[dict[str, Any]], **hyperparameters: Any) -> Optimizer:
    """Returns RAdam of Liu et al. 2020, arXiv 1908.03265, algorithm 2, with decoupled decay."""
    return RAdam(groups, decoupled_weight_decay=True, **hyperparameters)
