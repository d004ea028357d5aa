"""The composite loss of a ranking model: point error, cross-sectional IC, soft RankIC and Sharpe, in fp32.

Shapes: predictions, targets, returns, valid are [days, horizons, stocks]. What is masked out is replaced before any
arithmetic, since 0 * NaN is NaN, in the backward pass too. A day of fewer than `min_stocks` valid stocks, or of a
constant target, at any weighted horizon is excluded and counted; when all are excluded the count is 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.errors import ConfigError
from trainer.losses import weighted_sum
from trainer.losses.base import full_precision
from trainer.losses.ranking import EPS, correlation, moments, sharpe_ratios, soft_rank_ic
from trainer.task import Loss


@full_precision
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
) -> Loss:
    """sum_h omega_h sum_k lambda_k L_kh of a batch of days.

    Terms are raw, before their weights, averaged over the weighted horizons. mask: [days, stocks]; blocks: [blocks,
    days], 1 where the day belongs to the block of consecutive days over which the Sharpe term is taken; returns may be
    on any scale (the Sharpe ratio has none); horizon_weights: [horizons].
    """
    weighted = horizon_weights > 0
    valid = mask[:, None] & targets.isfinite() & returns.isfinite()
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
        per_day["sharpe"] = -sharpe_ratios(p, r, valid, blocks * days)
    # A mean over days of equal weight, whatever the number of stocks; a sum here, divided by the count of the window.
    count, excluded = days.sum(), {"excluded_days": (~days).sum().float()}
    losses = {k: Loss((torch.where(days[:, None], v, 0.0) @ omega).sum(), count) for k, v in per_day.items()}
    total = weighted_sum(losses, weights)
    return Loss(total.sum, count, {**total.terms, **excluded})


def point_error(p: Tensor, y: Tensor, valid: Tensor, kind: str) -> Tensor:
    """Mean squared or Huber error (delta 1) of each day, [...]."""
    if kind == "mse":
        error = (p - y).square()
    elif kind == "huber":
        error = torch.nn.functional.huber_loss(p, y, reduction="none")
    else:
        raise ConfigError(f"loss.point {kind!r} is not a point loss: choose mse or huber.")
    return (error * valid).sum(dim=-1) / valid.sum(dim=-1).clamp(min=1)
