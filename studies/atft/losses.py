"""The composite loss of a ranking model: point error, cross-sectional IC, soft RankIC and Sharpe, in fp32.

Shapes: predictions, targets, returns, valid are [days, horizons, stocks]. What is masked out is replaced before any
arithmetic, since 0 * NaN is NaN, in the backward pass too. A day of fewer than `min_stocks` valid stocks, or of a
constant target, at any weighted horizon is excluded and counted; when all are excluded the count is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.errors import ConfigError

EPS = 1e-6
MIN_SHARPE_DAYS = 8


@dataclass(frozen=True)
class Composite:
    """Sums over `count` days. `terms` are raw, before their weights, averaged over the weighted horizons."""

    sum: Tensor
    count: Tensor
    terms: dict[str, Tensor]


def composite(
    predictions: Tensor,
    targets: Tensor,
    returns: Tensor,
    mask: Tensor,
    blocks: Tensor,
    *,
    weights: Mapping[str, float],
    horizon_weights: Tensor,
    tau: float,
    point: str = "mse",
    min_stocks: int = 20,
) -> Composite:
    """sum_h omega_h sum_k lambda_k L_kh of a batch of days.

    mask: [days, stocks]; blocks: [blocks, days], 1 where the day belongs to the block of consecutive days over which
    the Sharpe term is taken; returns may be on any scale (the Sharpe ratio has none); horizon_weights: [horizons].
    """
    predictions = predictions.float()
    weighted = horizon_weights > 0
    valid = mask[:, None] & predictions.isfinite() & targets.isfinite() & returns.isfinite()
    p, y, r = (torch.where(valid, v, 0.0) for v in (predictions, targets.float(), returns.float()))
    _, spread, n = moments(y, valid)
    days = ((n >= min_stocks) & (spread > EPS) | ~weighted).all(dim=1)
    omega = horizon_weights * weighted
    per_day: dict[str, Tensor] = {}
    if "mse" in weights:
        per_day["mse"] = point_error(p, y, valid, point)
    if "cs_ic" in weights:
        per_day["cs_ic"] = 1 - correlation(p, y, valid)
    if "rank_ic" in weights:
        per_day["rank_ic"] = 1 - soft_rank_ic(p, y, valid, tau)
    if "sharpe" in weights:
        per_day["sharpe"] = -sharpe(p, r, valid, blocks * days)
    # A mean over days of equal weight, whatever the number of stocks; a sum here, divided by the count of the window.
    terms = {k: (torch.where(days[:, None], v, 0.0) @ omega).sum() for k, v in per_day.items()}
    total = sum((weights[k] * terms[k] for k in weights), predictions.new_zeros(()))
    count = days.sum()
    excluded = {"excluded_days": (~days).sum().float()}
    return Composite(total, count, {f"loss_{k}": v.detach() for k, v in terms.items()} | excluded)


def moments(x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, variance, number) over the valid stocks, [...] from x [..., stocks]; x is 0 where not valid."""
    n = valid.sum(dim=-1)
    safe = n.clamp(min=1)
    mean = x.sum(dim=-1) / safe
    centred = torch.where(valid, x - mean[..., None], 0.0)
    return mean, centred.square().sum(dim=-1) / safe, n


def point_error(p: Tensor, y: Tensor, valid: Tensor, kind: str) -> Tensor:
    """Mean squared or Huber error (delta 1) of each day, [...]."""
    if kind == "mse":
        error = (p - y).square()
    elif kind == "huber":
        error = torch.nn.functional.huber_loss(p, y, reduction="none")
    else:
        raise ConfigError(f"loss.point {kind!r} is not a point loss: choose mse or huber.")
    return (error * valid).sum(dim=-1) / valid.sum(dim=-1).clamp(min=1)


def correlation(p: Tensor, y: Tensor, valid: Tensor) -> Tensor:
    """cov / sqrt((var p + eps)(var y + eps)): eps inside the root keeps the gradient finite at a constant p."""
    p_mean, p_var, n = moments(p, valid)
    y_mean, y_var, _ = moments(y, valid)
    product = torch.where(valid, (p - p_mean[..., None]) * (y - y_mean[..., None]), 0.0)
    return product.sum(dim=-1) / n.clamp(min=1) / ((p_var + EPS) * (y_var + EPS)).sqrt()


def soft_ranks(p: Tensor, valid: Tensor, tau: float) -> Tensor:
    """R_i = 1/2 + sum_j sigmoid((s_i - s_j) / tau) over valid j, s standardised: average ranks 1..n as tau -> 0."""
    mean, variance, _ = moments(p, valid)
    s = (p - mean[..., None]) / (variance + EPS).sqrt()[..., None]
    ahead = torch.sigmoid((s[..., :, None] - s[..., None, :]) / tau)
    return 0.5 + (ahead * valid[..., None, :]).sum(dim=-1)


def average_ranks(y: Tensor, valid: Tensor) -> Tensor:
    """Ranks 1..n of the valid, ties sharing their mean. No gradient."""
    y = torch.where(valid, y, torch.inf).detach().contiguous()
    ordered = y.sort(dim=-1).values
    below = torch.searchsorted(ordered, y, right=False)
    upto = torch.searchsorted(ordered, y, right=True)
    return (below + upto + 1) / 2


def soft_rank_ic(p: Tensor, y: Tensor, valid: Tensor, tau: float) -> Tensor:
    """Correlation of the soft ranks of p with the average ranks of y; ranks as shares of n, so that eps is small."""
    n = valid.sum(dim=-1, keepdim=True).clamp(min=1)
    soft = torch.where(valid, soft_ranks(p, valid, tau) / n, 0.0)
    hard = torch.where(valid, average_ranks(y, valid) / n, 0.0)
    return correlation(soft, hard, valid)


def sharpe(p: Tensor, r: Tensor, valid: Tensor, blocks: Tensor) -> Tensor:
    """mean / sqrt(var + eps) of the daily return of dollar-neutral weights of gross 1, given to each day of its block.

    blocks: [blocks, days], 0 for excluded days; a block of fewer than MIN_SHARPE_DAYS gives its days 0, without
    gradient. With h > 1 the returns of successive days overlap: the variance within a block is then understated, which
    scales the term but not the order of portfolios. The metric of the same name holds overlapping books instead.
    """
    mean, _, _ = moments(p, valid)
    centred = torch.where(valid, p - mean[..., None], 0.0)
    w = centred / (centred.abs().sum(dim=-1, keepdim=True) + EPS)
    daily = (w * r).sum(dim=-1)
    blocks = blocks.to(daily.dtype)
    n = blocks.sum(dim=1, keepdim=True)
    average = blocks @ daily / n.clamp(min=1)
    deviation = daily - blocks.T @ average
    variance = blocks @ deviation.square() / n.clamp(min=1)
    ratio = torch.where(n >= MIN_SHARPE_DAYS, average / (variance + EPS).sqrt(), 0.0)
    return blocks.T @ ratio
