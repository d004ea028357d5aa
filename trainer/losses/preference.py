"""Holds preference losses over log-probabilities of whole answers under the policy and a frozen reference.

`chosen`, `rejected` and so on are [n], each the sum of the answer's token log-probabilities (`sequence_log_probs`). The
losses are sums over pairs, so that accumulation is exact; for `kto` see its conditions. Terms are sums over the same
count.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.losses.base import full_precision, same_shape, total
from trainer.task import Loss


@full_precision
def sequence_log_probs(logits: Tensor, targets: Tensor, *, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Returns (sum of log softmax(logits)[target] over the answer's tokens [batch], their number [batch]).

    logits: [batch, time, classes], where logits[:, t] predicts targets[:, t]: shift a causal model's outputs before;
    targets: [batch, time], `ignore_index` outside the answer.
    """
    same_shape(logits=logits[..., 0], targets=targets)
    answered = targets != ignore_index
    log_probs = -F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=ignore_index, reduction="none")
    return torch.where(answered, log_probs, 0.0).sum(dim=1), answered.sum(dim=1)


def _margin(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    """Returns h = log pi(y_w)/ref(y_w) - log pi(y_l)/ref(y_l)."""
    same_shape(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    return (chosen - ref_chosen) - (rejected - ref_rejected)


def _pairs(loss: Tensor, margin: Tensor, beta: float) -> Loss:
    return total(loss, None, reward_margin=beta * margin, reward_accuracy=(margin > 0).to(margin.dtype))


@full_precision
def dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Loss:
    """Returns the loss -log sigmoid(beta h) (Rafailov et al. 2023, arXiv 2305.18290, eq. 7).

    With smoothing e it is -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h) (Mitchell 2023, conservative DPO).
    """
    h = _margin(chosen, rejected, ref_chosen, ref_rejected)
    loss = -(1 - label_smoothing) * F.logsigmoid(beta * h) - label_smoothing * F.logsigmoid(-beta * h)
    return _pairs(loss, h, beta)


@full_precision
def ipo(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float = 0.1) -> Loss:
    """Returns the loss (h - 1/(2 beta))^2 (Azar et al. 2023, arXiv 2310.12036, eq. 17, whose tau is beta).

    If answers differ in length, give log-probabilities per token instead of their sums, as TRL does.
    """
    h = _margin(chosen, rejected, ref_chosen, ref_rejected)
    return _pairs((h - 1 / (2 * beta)).square(), h, beta)


@full_precision
def kto(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    kl: Tensor | None = None,
    *,
    beta: float = 0.1,
    weight_desirable: float = 1.0,
    weight_undesirable: float = 1.0,
) -> Loss:
    """Returns the loss lambda_y - v (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8).

    It is lambda_D (1 - sigmoid(beta (r - z))) for a desirable answer, lambda_U (1 - sigmoid(beta (z - r))) for any
    other, with r = log policy/reference.

    policy, reference, desirable: [n]; kl: [m], log policy/reference of answers to other prompts: z is their mean, at
    least 0, without gradient, and 0 without `kl`. For a fixed z the loss is a sum over answers: accumulation is exact
    if every micro-batch gets the `kl` of the whole window.
    """
    same_shape(policy=policy, reference=reference, desirable=desirable)
    r = policy - reference
    z = r.new_zeros(()) if kl is None else kl.detach().mean().clamp(min=0)
    wanted = weight_desirable * torch.sigmoid(-beta * (r - z))
    unwanted = weight_undesirable * torch.sigmoid(-beta * (z - r))
    return total(torch.where(desirable.bool(), wanted, unwanted), None, reward=beta * r, kl=z.expand_as(r))
