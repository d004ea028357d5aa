"""Computes the cross-entropy of a linear layer with many outputs without holding all of its logits.

A language model's logits, [tokens, vocabulary], are by far the largest tensor of a step: 65,536 tokens of a vocabulary
of 50,304 take 13 GB in float32, and a backward pass several times that. Here a block of tokens is taken at a time, its
loss and both gradients computed, and its logits dropped (as Liger Kernel does, Hsu et al. 2024, arXiv 2410.10989,
section 3.2). The products are the same as without blocks, so it costs no more operations.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from trainer.losses.base import same_shape
from trainer.losses.pointwise import cross_entropy
from trainer.runtime.second_order import plainly
from trainer.task import Loss

LARGE = 1 << 26  # logits; from this number on they are computed in blocks
_BLOCK = 1 << 28  # logits of a block: a gigabyte in float32


def in_blocks(tokens: int, classes: int) -> bool:
    """Returns True if logits [tokens, classes] are so many that `linear_cross_entropy` computes them in blocks."""
    return tokens * classes >= LARGE


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    block: int | None = None,
) -> Loss:
    """Returns the `cross_entropy` of the logits x weight^T, plus z_loss * log(Z)^2 of each target.

    Z is the sum of the exponentials of its logits (Chowdhery et al. 2022, arXiv 2204.02311, section 5).

    x: [..., width]; weight: [classes, width]; targets: [...] of class numbers, `ignore_index` for a missing one; the
    count is the number of the others. Products are computed in autocast's type, all else in float32 at least. `block`
    is the number of tokens taken at a time, by default as many as make a gigabyte of logits; few logits are
    computed at once, as are those that must be differentiated twice or are vectorised.
    """
    same_shape(x=x[..., 0], targets=targets)
    flat, y = x.flatten(0, -2), targets.flatten()
    if plainly() or (block is None and not in_blocks(len(y), len(weight))):
        logits = F.linear(flat, weight)
        loss = cross_entropy(logits, y, label_smoothing=label_smoothing, ignore_index=ignore_index)
        return loss if z_loss == 0 else Loss(loss.sum + _squared(logits, y, z_loss, ignore_index), loss.count)
    size = block or max(_BLOCK // len(weight), 1)
    device = x.device.type
    if torch.is_autocast_enabled(device):
        flat = flat.to(torch.get_autocast_dtype(device))
    learns = torch.is_grad_enabled() and (flat.requires_grad or weight.requires_grad)
    with torch.autocast(device, enabled=False):
        total = _Blocks.apply(flat, weight, y, size, label_smoothing, z_loss, ignore_index, learns)
    return Loss(total, (y != ignore_index).sum())


def _squared(logits: Tensor, targets: Tensor, z_loss: float, ignore_index: int) -> Tensor:
    normaliser = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return z_loss * torch.where(targets != ignore_index, normaliser.logsumexp(-1).square(), 0.0).sum()


class _Blocks(torch.autograd.Function):
    """The summed loss; gradients are computed with it, and scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        size: int,
        smoothing: float,
        z_loss: float,
        ignore_index: int,
        learns: bool,
    ) -> Tensor:
        total = torch.zeros((), dtype=_wide(x), device=x.device)
        w = weight.to(x.dtype)
        slopes: list[Tensor] = []
        of_weight = torch.zeros_like(weight) if learns else None
        for part, y in zip(x.split(size), targets.split(size), strict=True):
            loss, slope = _block(part @ w.T, y, smoothing, z_loss, ignore_index, learns)
            total += loss
            if of_weight is not None and slope is not None:
                slopes.append(slope @ w)
                of_weight += slope.T @ part
        if of_weight is not None:
            ctx.save_for_backward(torch.cat(slopes), of_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        of_x, of_weight = ctx.saved_tensors
        return (of_x * grad).to(of_x.dtype), of_weight * grad, None, None, None, None, None, None


def _block(
    logits: Tensor, targets: Tensor, smoothing: float, z_loss: float, ignore_index: int, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the summed loss of a block and its gradient by the logits, in their type.

    With p = softmax(logits), s the smoothing and K classes, the gradient of a target's loss is
    p (1 + 2 z log Z) - s / K, less 1 - s at the target. Without a compiler each line is a pass over the block, so
    operations are in place where possible.
    """
    valid = targets != ignore_index
    y = torch.where(valid, targets, 0)[:, None]
    log_p = F.log_softmax(logits, dim=-1, dtype=_wide(logits))
    at_target = log_p.gather(1, y)
    log_z = logits.gather(1, y) - at_target
    loss = (smoothing - 1) * at_target + z_loss * log_z.square()
    if smoothing:
        loss = loss - smoothing * log_p.mean(-1, keepdim=True)
    total = torch.where(valid[:, None], loss, 0.0).sum()
    if not learns:
        return total, None
    slope = log_p.exp_()
    if z_loss:
        slope.mul_(1 + 2 * z_loss * log_z)
    if smoothing:
        slope.sub_(smoothing / logits.shape[1])
    if torch.compiler.is_compiling():  # fuses with the lines before, whereas a scatter would write all of it first
        classes = torch.arange(logits.shape[1], device=logits.device)
        slope = torch.where(classes == y, slope - (1 - smoothing), slope)
    else:
        slope.scatter_(1, y, slope.gather(1, y) - (1 - smoothing))
    return total, slope.to(logits.dtype).mul_(valid[:, None])


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
