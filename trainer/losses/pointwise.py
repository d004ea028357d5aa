"""Holds losses of single samples: sums over samples, so that accumulation over micro-batches is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.errors import TrainerError
from trainer.losses.base import full_precision, same_shape, total, zeroed
from trainer.task import Loss


@full_precision
def mse(predictions: Tensor, targets: Tensor, mask: Tensor | None = None) -> Loss:
    """Returns the loss (p - y)^2; all [...], the count is the number of elements, or of those where `mask` is true."""
    same_shape(predictions=predictions, targets=targets)
    p, y = zeroed(mask, predictions, targets)
    return total((p - y).square(), mask)


@full_precision
def huber(predictions: Tensor, targets: Tensor, mask: Tensor | None = None, *, delta: float = 1.0) -> Loss:
    """Returns the loss e^2/2 up to |e| = delta, delta (|e| - delta/2) beyond (Huber 1964); shapes as for mse."""
    same_shape(predictions=predictions, targets=targets)
    p, y = zeroed(mask, predictions, targets)
    return total(F.huber_loss(p, y, reduction="none", delta=delta), mask)


@full_precision
def quantile(
    predictions: Tensor, targets: Tensor, mask: Tensor | None = None, *, quantiles: Sequence[float] = (0.1, 0.5, 0.9)
) -> Loss:
    """Returns the pinball loss max(q e, (q - 1) e), e = y - p, mean over the quantiles (Koenker & Bassett 1978).

    predictions: [..., quantiles]; targets, mask: [...]; the count is the number of targets. Raises TrainerError for a
    level outside (0, 1) or another number of predictions.
    """
    if predictions.shape[-1] != len(quantiles) or not all(0 < q < 1 for q in quantiles):
        raise TrainerError(
            f"quantile got {predictions.shape[-1]} predictions for the levels {[*quantiles]}: give one for each level "
            "between 0 and 1."
        )
    same_shape(predictions=predictions[..., 0], targets=targets)
    levels = torch.tensor(quantiles, dtype=predictions.dtype, device=predictions.device)
    wide = None if mask is None else mask[..., None]
    p, y = zeroed(wide, predictions, targets[..., None].expand_as(predictions))
    error = y - p
    return total(torch.maximum(levels * error, (levels - 1) * error).mean(dim=-1), mask)


@full_precision
def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    label_smoothing: float | Tensor = 0.0,
    temperature: float = 1.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Loss:
    """Returns -sum_k q_k log softmax(logits / temperature)_k, as torch does.

    Smoothing is by Szegedy et al. 2016, arXiv 1512.00567.

    logits: [..., classes]; targets: [...] of class numbers, `ignore_index` for a missing one, or [..., classes] of
    probabilities; weight: [classes]; label_smoothing: a number, or a tensor [] under torch.vmap. The count is the
    number of targets, each counted by its class weight if there is one, as in torch's mean.
    """
    flat = logits.flatten(0, -2) / temperature
    if targets.is_floating_point():
        same_shape(logits=logits, targets=targets)
        return Loss(_smoothed(flat, targets.flatten(0, -2), label_smoothing, weight=weight), len(flat))
    same_shape(logits=logits[..., 0], targets=targets)
    y = targets.flatten()
    loss = _smoothed(flat, y, label_smoothing, weight=weight, ignore_index=ignore_index)
    valid = y != ignore_index
    counted = valid if weight is None else torch.where(valid, weight[torch.where(valid, y, 0)], 0.0)
    return Loss(loss, counted.sum())


def _smoothed(logits: Tensor, targets: Tensor, smoothing: float | Tensor, **options: Any) -> Tensor:
    """Returns torch's summed loss for a smoothing that may be a tensor, in which the loss is linear.

    torch takes only a number for it.
    """
    if not isinstance(smoothing, Tensor):
        return F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="sum", **options)
    hard, even = (F.cross_entropy(logits, targets, label_smoothing=s, reduction="sum", **options) for s in (0.0, 1.0))
    return hard + smoothing * (even - hard)


@full_precision
def focal(
    logits: Tensor,
    targets: Tensor,
    *,
    gamma: float = 2.0,
    alpha: Tensor | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> Loss:
    """Returns the loss -alpha_y (1 - p_y)^gamma log p_y (Lin et al. 2017, arXiv 1708.02002, eq. 5).

    logits: [..., classes]; targets: [...]; alpha: [classes]. The count is the number of targets, whatever alpha is.
    With gamma 0 it is cross-entropy.
    """
    same_shape(logits=logits[..., 0], targets=targets)
    y, valid = targets.flatten(), targets.flatten() != ignore_index
    y = torch.where(valid, y, 0)
    log_p = (logits.flatten(0, -2) / temperature).log_softmax(dim=-1).gather(1, y[:, None])[:, 0]
    # Where p rounds to 1, a power below 1 has no finite slope, so 1 - p has a lower bound.
    rest = (-torch.expm1(log_p)).clamp(min=torch.finfo(log_p.dtype).tiny)
    loss = -(rest**gamma) * log_p
    return total(loss if alpha is None else alpha[y] * loss, valid)


@full_precision
def ctc(logits: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *, blank: int = 0) -> Loss:
    """Returns -log p(target | logits) over all alignments (Graves et al. 2006); the count is the number of sequences.

    logits: [batch, time, classes]; targets: [batch, length]; both lengths: [batch]. A sequence too short for its
    target has no alignment: it is left out of sum and count, and counted in the term `impossible`.
    """
    log_p = logits.log_softmax(dim=-1).transpose(0, 1)
    if log_p.numel():
        lengths = (input_lengths, target_lengths)
        loss = F.ctc_loss(log_p, targets, *lengths, blank=blank, reduction="none", zero_infinity=True)
    else:  # torch refuses an empty tensor: -log 1 for each sequence
        loss = log_p.sum(dim=(0, 2))
    within = torch.arange(1, max(targets.shape[1], 1), device=targets.device) < target_lengths[:, None]
    repeats = ((targets[:, 1:] == targets[:, :-1]) & within).sum(dim=1)  # each needs a blank between
    possible = input_lengths >= target_lengths + repeats
    return Loss(loss.sum(), possible.sum(), {"impossible": (~possible).sum()})
