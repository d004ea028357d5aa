"""From a window of micro-batches to the gradient the optimizer steps on."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import ClipConfig
from trainer.errors import TrainerError
from trainer.task import Loss


@dataclass(slots=True)
class Window:
    """What one window's forward and backward passes left behind, besides the gradients: sums, not yet divided."""

    loss: float | Tensor
    count: float | Tensor
    terms: dict[str, Tensor]


def accumulate(batches: Sequence[Any], loss_of: Callable[[int, Any], Loss]) -> Window:
    """Add up the gradients of the *summed* loss of each micro-batch; nothing is divided yet.

    With L_i the sum and n_i the count of micro-batch i, the large batch's gradient is (sum_i dL_i) / (sum_i n_i), and
    not the mean of the means dL_i / n_i, which over-weights small micro-batches.
    """
    window = Window(0.0, 0.0, {})
    for i, batch in enumerate(batches):
        loss = loss_of(i, batch)
        if loss.sum.requires_grad:
            loss.sum.backward()
        elif float(loss.count) > 0:
            raise TrainerError("Task.loss returned a sum without a gradient: compute it from the model's output.")
        window.loss = loss.sum.detach() if i == 0 else window.loss + loss.sum.detach()
        window.count = loss.count if i == 0 else window.count + loss.count
        for name, term in loss.terms.items():
            window.terms[name] = term.detach() + window.terms[name] if name in window.terms else term.detach()
    return window


@torch.no_grad()
def divide_and_clip(
    params: Sequence[nn.Parameter], count: float | Tensor, clip: ClipConfig, *, wait: bool
) -> float | Tensor:
    """Divide the accumulated gradients by `count` and clip them, by norm and then by value; give their norm before.

    Division and clipping by norm are one multiplication by min(1, clip / |g|) / count, where |g| = |sum| / count
    (Pascanu et al. 2013, arXiv 1211.5063). A count of 0 gives a norm that is not finite. With `wait` the norm is read,
    and a float; without, all of it stays on the device.
    """
    grads = [p.grad for p in params if p.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    if wait:
        norm, count = norm.item(), float(count) or math.nan
    norm = norm / count
    scale = 1.0 if clip.norm is None else clip.norm / (norm + 1e-6)
    if grads:
        at_most_one = scale.clamp(max=1.0) if isinstance(scale, Tensor) else min(scale, 1.0)
        torch._foreach_mul_(grads, at_most_one / count)
    if grads and clip.value is not None:
        torch._foreach_clamp_min_(grads, -clip.value)
        torch._foreach_clamp_max_(grads, clip.value)
    return norm
