"""Holds losses of a cross-section, such as the stocks of a day: correlation, correlation of ranks, Sharpe ratio.

Shapes: predictions, targets, valid are [..., items], one cross-section per row; in a Loss the rows are [days]. Invalid
items are replaced before any arithmetic. A row of fewer than `min_items` valid items, or of constant targets, has no
rank: it is left out of sum and count, and counted in the term `excluded_days`. A Loss is a sum over days, so that
accumulation is exact where micro-batches are cut between days (for `sharpe`, between blocks), not within them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.losses.base import full_precision, same_shape, zeroed
from trainer.task import Loss

EPS = 1e-6
MIN_SHARPE_DAYS = 8


@full_precision
def rank_ic(
    predictions: Tensor, targets: Tensor, valid: Tensor | None = None, *, tau: float = 0.2, min_items: int = 2
) -> Loss:
    """Returns the loss 1 - RankIC of each day, with the soft ranks of `soft_ranks`.

    `tau` is the temperature of the comparison.
    """
    p, y, valid = _cleaned(predictions, targets, valid)
    scored = (valid.sum(dim=-1) >= min_items) & _varies(y, valid)
    return _sum_over(scored, 1 - soft_rank_ic(p, y, valid, tau))


@full_precision
def cs_ic(predictions: Tensor, targets: Tensor, valid: Tensor | None = None, *, min_items: int = 2) -> Loss:
    """Returns the loss 1 - Pearson correlation of each day's cross-section.

    Targets may have any scale; predictions must be well above 0.001.
    """
    p, y, valid = _cleaned(predictions, targets, valid)
    mean, variance, n = moments(y, valid)
    scored = (n >= min_items) & _varies(y, valid)
    y = torch.where(valid, y - mean[..., None], 0.0) / torch.where(scored, variance, 1.0).sqrt()[..., None]
    return _sum_over(scored, 1 - correlation(p, y, valid))


@full_precision
def sharpe(
    predictions: Tensor,
    returns: Tensor,
    valid: Tensor | None = None,
    blocks: Tensor | None = None,
    *,
    min_items: int = 2,
) -> Loss:
    """Returns the loss -Sharpe ratio of the block, for each of its days.

    blocks: [blocks, days], by default one of all days.
    """
    p, r, valid = _cleaned(predictions, returns, valid)
    scored = valid.sum(dim=-1) >= min_items
    blocks = torch.ones(1, len(scored), device=scored.device) if blocks is None else blocks
    return _sum_over(scored, -sharpe_ratios(p, r, valid, blocks * scored))


def _cleaned(predictions: Tensor, targets: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (predictions, targets, valid), zeroed where not valid.

    A target that is not finite is not valid; a prediction that is not finite stays, and shows in the loss.
    """
    same_shape(predictions=predictions, targets=targets)
    valid = targets.isfinite() if valid is None else valid & targets.isfinite()
    p, y = zeroed(valid, predictions, targets)
    return p, y, valid


def _varies(y: Tensor, valid: Tensor) -> Tensor:
    """Returns True for rows whose targets differ by more than rounding, on any scale."""
    mean, variance, _ = moments(y, valid)
    return variance > 1e-12 * (variance + mean.square())


def _sum_over(days: Tensor, values: Tensor) -> Loss:
    return Loss(torch.where(days, values, 0.0).sum(), days.sum(), {"excluded_days": (~days).sum()})


def moments(x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (mean, variance, number) over the valid items, [...] from x [..., items]; x is 0 where not valid."""
    n = valid.sum(dim=-1)
    safe = n.clamp(min=1)
    mean = x.sum(dim=-1) / safe
    centred = torch.where(valid, x - mean[..., None], 0.0)
    return mean, centred.square().sum(dim=-1) / safe, n


def correlation(p: Tensor, y: Tensor, valid: Tensor) -> Tensor:
    """Returns cov / sqrt((var p + eps)(var y + eps)): eps in the root keeps the gradient finite at a constant p."""
    p_mean, p_var, n = moments(p, valid)
    y_mean, y_var, _ = moments(y, valid)
    product = torch.where(valid, (p - p_mean[..., None]) * (y - y_mean[..., None]), 0.0)
    return product.sum(dim=-1) / n.clamp(min=1) / ((p_var + EPS) * (y_var + EPS)).sqrt()


def soft_ranks(p: Tensor, valid: Tensor, tau: float) -> Tensor:
    """Returns R_i = 1/2 + sum_j sigmoid((s_i - s_j) / tau) over valid j, s standardised.

    These are the average ranks 1..n as tau -> 0 (Qin, Liu & Li 2010, "A general approximation framework", eq. 11).
    """
    mean, variance, _ = moments(p, valid)
    s = (p - mean[..., None]) / (variance + EPS).sqrt()[..., None]
    ahead = torch.sigmoid((s[..., :, None] - s[..., None, :]) / tau)
    return 0.5 + (ahead * valid[..., None, :]).sum(dim=-1)


def average_ranks(y: Tensor, valid: Tensor) -> Tensor:
    """Returns the ranks 1..n of the valid items, without gradient; ties share their mean."""
    y = torch.where(valid, y, torch.inf).detach().contiguous()
    ordered = y.sort(dim=-1).values
    below = torch.searchsorted(ordered, y, right=False)
    upto = torch.searchsorted(ordered, y, right=True)
    return (below + upto + 1) / 2


def soft_rank_ic(p: Tensor, y: Tensor, valid: Tensor, tau: float) -> Tensor:
    """Returns the correlation of p's soft ranks with y's average ranks, both divided by n so that eps stays small."""
    n = valid.sum(dim=-1, keepdim=True).clamp(min=1)
    soft = torch.where(valid, soft_ranks(p, valid, tau) / n, 0.0)
    hard = torch.where(valid, average_ranks(y, valid) / n, 0.0)
    return correlation(soft, hard, valid)


def sharpe_ratios(p: Tensor, r: Tensor, valid: Tensor, blocks: Tensor) -> Tensor:
    """Returns mean / sqrt(var + eps) of the daily return of dollar-neutral weights of gross 1, for each block's days.

    p, r, valid: [days, ..., items]; blocks: [blocks, days], 0 for excluded days; a block of fewer than MIN_SHARPE_DAYS
    gives its days 0, without gradient. Returns over h > 1 days of successive days share up to h - 1 of their days: a
    portfolio that stays the same varies less within a block than one that trades, so the term rewards persistence, and
    more so the longer h is relative to the block. Scale the returns to a deviation of about 1: the ratio has no scale
    (Sharpe 1966), but eps has.
    """
    mean, _, _ = moments(p, valid)
    centred = torch.where(valid, p - mean[..., None], 0.0)
    w = centred / (centred.abs().sum(dim=-1, keepdim=True) + EPS)
    daily = (w * r).sum(dim=-1)
    blocks = blocks.to(daily.dtype)
    n = blocks.sum(dim=1)
    n = n.reshape(-1, *[1] * (daily.ndim - 1))
    average = torch.tensordot(blocks, daily, 1) / n.clamp(min=1)
    deviation = daily - torch.tensordot(blocks.T, average, 1)
    variance = torch.tensordot(blocks, deviation.square(), 1) / n.clamp(min=1)
    ratio = torch.where(n >= MIN_SHARPE_DAYS, average / (variance + EPS).sqrt(), 0.0)
    return torch.tensordot(blocks.T, ratio, 1)
