"""Computes the composite loss of a ranking model: point error, cross-sectional IC, soft RankIC and Sharpe, in fp32.

Shapes: predictions, targets, returns, valid are [days, horizons, stocks]. Masked values are replaced before any
arithmetic, since 0 * NaN is NaN, in the backward pass too. A day of fewer than `min_stocks` valid stocks, or of a
constant target, at any weighted horizon is excluded and counted; so is one whose block has too few days left for the
Sharpe term, if that is weighted. When all are excluded the count is 0, and the step is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.errors import ConfigError
from trainer.losses import weighted_sum
from trainer.losses.base import full_precision
from trainer.losses.ranking import EPS, MIN_SHARPE_DAYS, correlation, moments, sharpe_ratios, soft_rank_ic
from trainer.task import Loss

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
MEDIAN = QUANTILES.index(0.5)


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
    shares: bool = False,
) -> Loss:
    """Returns sum_h omega_h sum_k lambda_k L_kh of a batch of days.

    Terms are raw, before their weights, averaged over the weighted horizons. The weight "mse" is that of the point loss
    `point`: mse, huber, or quantile, for which predictions are [..., stocks, QUANTILES] and the median is
    ranked. mask: [days, stocks]; blocks: [blocks, days], 1 where the day belongs to the block of consecutive days over
    which the Sharpe term is taken. returns may be on any scale, so that of h days over h as well as in deviations: the
    Sharpe ratio has none. horizon_weights: [horizons]. `shares` adds the terms of `gradient_shares`.
    """
    weighted = horizon_weights > 0
    valid = mask[:, None] & targets.isfinite() & returns.isfinite()
    y, r = (torch.where(valid, v, 0.0) for v in (targets.float(), returns.float()))
    days = _scored(y, valid, weighted, min_stocks)
    if "sharpe" in weights:
        enough = (blocks * days).sum(dim=1, keepdim=True) >= MIN_SHARPE_DAYS
        days = days & (blocks.bool() & enough).any(dim=0)
    outputs = torch.where(valid[..., None] if point == "quantile" else valid, predictions, 0.0)
    p = outputs[..., MEDIAN] if point == "quantile" else outputs
    per_day: dict[str, Tensor] = {}
    if "mse" in weights:
        per_day[point] = point_error(outputs, y, valid, point)
    if "cs_ic" in weights:
        per_day["cs_ic"] = 1 - correlation(p, y, valid)
    if "rank_ic" in weights:
        per_day["rank_ic"] = 1 - soft_rank_ic(p, y, valid, tau)
    if "sharpe" in weights:
        per_day["sharpe"] = -sharpe_ratios(p, r, valid, blocks * days)
    # A mean over days of equal weight, whatever the number of stocks; a sum here, divided by the count of the window.
    omega, count = horizon_weights * weighted, days.sum()
    losses = {k: Loss((torch.where(days[:, None], v, 0.0) @ omega).sum(), count) for k, v in per_day.items()}
    named = {point if name == "mse" else name: weight for name, weight in weights.items()}
    total = weighted_sum(losses, named)
    terms = {**total.terms, "excluded_days": (~days).sum().float()}
    return Loss(total.sum, count, terms | (gradient_shares(losses, named, predictions) if shares else {}))


def gradient_shares(losses: Mapping[str, Loss], weights: Mapping[str, float], predictions: Tensor) -> dict[str, Tensor]:
    """Returns `grad_share_<name>` of each term: |g_k| / sum_j |g_j| with g_k its weighted gradient by the predictions.

    The gradient by the parameters would take a backward pass through the model for each term, this one none, and the
    chain rule sends all terms through the same Jacobian. It is times the count, like the terms of a Loss.
    """
    norms = {}
    for name, loss in losses.items():
        (gradient,) = torch.autograd.grad(weights[name] * loss.sum, predictions, retain_graph=True)
        norms[name] = gradient.norm()
    total = torch.stack(list(norms.values())).sum().clamp(min=torch.finfo(torch.float32).tiny)
    return {f"grad_share_{name}": norm / total * losses[name].count for name, norm in norms.items()}


def point_error(p: Tensor, y: Tensor, valid: Tensor, kind: str) -> Tensor:
    """Returns the mean over a day's stocks, [days, horizons], of a point error.

    This is the squared error, the Huber error (delta 1), or the quantile loss max(q e, (q - 1) e), a mean over
    QUANTILES (Koenker and Bassett, 1978).
    """
    if kind == "mse":
        error = (p - y).square()
    elif kind == "huber":
        error = torch.nn.functional.huber_loss(p, y, reduction="none")
    elif kind == "quantile":
        levels, difference = p.new_tensor(QUANTILES), y[..., None] - p
        error = torch.maximum(levels * difference, (levels - 1) * difference).mean(dim=-1)
    else:
        raise ConfigError(f"loss.point {kind!r} is not a point loss: choose mse, huber or quantile.")
    return (error * valid).sum(dim=-1) / valid.sum(dim=-1).clamp(min=1)


def _scored(y: Tensor, valid: Tensor, weighted: Tensor, min_stocks: int) -> Tensor:
    """Returns [days]: True with enough stocks whose targets differ, at every weighted horizon."""
    _, spread, n = moments(y, valid)
    return ((n >= min_stocks) & (spread > EPS) | ~weighted).all(dim=1)
