"""Holds the losses of reinforcement learning from preferences, as pure functions of tensors.

Tensors of tokens are [batch, time], of answers [batch]. `mask` is true for the tokens of an answer, its end included;
whatever stands elsewhere is not read. Losses are sums with their counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.losses.base import full_precision, same_shape, total, zeroed
from trainer.task import Loss

GAIN, MOST = 0.1, 0.2  # of the adaptive coefficient, Ziegler et al. 2019, section 2.2
LEAST = 1e-4  # added to a group's standard deviation, as TRL does


def token_rewards(
    scores: Tensor, log_probs: Tensor, reference: Tensor, mask: Tensor, *, beta: float | Tensor
) -> Tensor:
    """Returns r_t = -beta (log pi(y_t) - log ref(y_t)), plus the answer's score at its last token, [batch, time].

    Ziegler et al. 2019, arXiv 1909.08593, eq. 2. scores: [batch]; log_probs, reference, mask: [batch, time].
    """
    same_shape(log_probs=log_probs, reference=reference, mask=mask)
    last = mask & (mask.flip(1).cumsum(dim=1).flip(1) == 1)
    return torch.where(mask, -beta * (log_probs - reference), 0.0) + torch.where(last, scores[:, None], 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, discount: float = 1.0, trace: float = 0.95) -> Tensor:
    """Returns the generalised advantages A_t = sum_l (discount trace)^l delta_(t+l), 0 outside the mask.

    delta_t = r_t + discount V(s_(t+1)) - V(s_t), where V is 0 after an answer's end: Schulman et al. 2016, arXiv
    1506.02438, eq. 16 (gamma is `discount`, lambda `trace`). rewards, values, mask: [batch, time]; values[:, t] is
    that of the state before token t. An answer's tokens stand together.
    """
    same_shape(rewards=rewards, values=values, mask=mask)
    rewards, values = zeroed(mask, rewards, values)
    advantages, after = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    later = after
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + discount * after - values[:, t]
        later = torch.where(mask[:, t], delta + discount * trace * later, 0.0)
        advantages[:, t], after = later, values[:, t]
    return advantages


def whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    """Returns the advantages of all tokens, shifted to the mean 0 and scaled to the standard deviation 1."""
    tokens = mask.sum().clamp(min=1)
    mean = torch.where(mask, advantages, 0.0).sum() / tokens
    centred = torch.where(mask, advantages - mean, 0.0)
    return centred / (centred.square().sum() / tokens).sqrt().clamp(min=1e-8)


@full_precision
def ppo(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, clip: float = 0.2) -> Loss:
    """Returns the loss -min(ratio A, clip(ratio, 1 - clip, 1 + clip) A) of each token, ratio = pi(y_t) / old(y_t).

    Schulman et al. 2017, arXiv 1707.06347, eq. 7. log_probs, old (of the policy that has drawn the answers),
    advantages, mask: [batch, time]. The count is that of tokens; the term `clip_share` has the number of those whose
    ratio is outside the bounds.
    """
    loss, outside = _clipped(log_probs, old, advantages, mask, clip)
    return total(loss, mask, clip_share=outside)


def _clipped(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Returns (the clipped loss, 1 if the ratio is outside the bounds else 0) of each token."""
    same_shape(log_probs=log_probs, old=old, advantages=advantages, mask=mask)
    log_probs, old, advantages = zeroed(mask, log_probs, old, advantages)
    ratio = (log_probs - old).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return loss, ((ratio - 1).abs() > clip).to(loss.dtype)


@full_precision
def value_loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, *, clip: float = 0.2) -> Loss:
    """Returns the loss max((V - R)^2, (old + clip(V - old, -clip, clip) - R)^2) / 2 of each token.

    Engstrom et al. 2020, arXiv 2005.12729, section 2, halved; clipped like PPO's ratio. values, old (of the value
    function when the answers were drawn), returns, mask: [batch, time].
    """
    same_shape(values=values, old=old, returns=returns, mask=mask)
    values, old, returns = zeroed(mask, values, old, returns)
    near = old + (values - old).clamp(-clip, clip)
    return total(torch.maximum((values - returns).square(), (near - returns).square()) / 2, mask)


def adapted(beta: Tensor, kl: Tensor, *, target: float) -> Tensor:
    """Returns beta (1 + GAIN e) with e = clip((kl - target) / target, -MOST, MOST), all scalars.

    Ziegler et al. 2019, arXiv 1909.08593, section 2.2. kl: the mean over answers of log pi - log ref, in nats.
    """
    return beta * (1 + GAIN * ((kl - target) / target).clamp(-MOST, MOST))


def group_advantages(rewards: Tensor, size: int) -> Tensor:
    """Returns (r_i - mean(r)) / (std(r) + LEAST) of each answer in its group, [batch].

    Shao et al. 2024, arXiv 2402.03300, section 4.1.2. rewards: [batch], of which `size` successive ones answer the same
    prompt; the deviation is that of a sample (n - 1).
    """
    groups = rewards.unflatten(0, (-1, size))
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + LEAST)).flatten()


def k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Returns ref/pi - log(ref/pi) - 1 of each token, which estimates the divergence of pi from ref and is never < 0.

    Shao et al. 2024, arXiv 2402.03300, eq. 4 (Schulman's k3).
    """
    difference = reference - log_probs
    return difference.exp() - difference - 1


@full_precision
def grpo(
    log_probs: Tensor,
    old: Tensor,
    reference: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float = 0.2,
    beta: float = 0.04,
) -> Loss:
    """Returns the loss of each answer: the mean over its tokens of PPO's clipped loss plus beta times `k3`.

    Shao et al. 2024, arXiv 2402.03300, eq. 3, with its sign turned. log_probs, old, reference, mask: [batch, time];
    advantages: [batch], one for all tokens of an answer. The count is that of answers.
    """
    loss, outside = _clipped(log_probs, old, advantages[:, None].expand_as(log_probs), mask, clip)
    log_probs, reference = zeroed(mask, log_probs, reference)
    tokens = mask.sum(dim=1).clamp(min=1)
    penalised = loss + beta * k3(log_probs, reference)
    mean, clipped = (torch.where(mask, x, 0.0).sum(dim=1) / tokens for x in (penalised, outside))
    return total(mean, None, clip_share=clipped)


def preferred(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the places of (chosen, rejected) answers, [pairs] each, of which two successive ones answer a prompt.

    Guo et al. 2024, arXiv 2402.04792, algorithm 1, with learnt `rewards` [2 pairs] in place of an annotator. The loss
    is DPO's of these answers (`trainer.losses.dpo`).
    """
    first = torch.arange(0, len(rewards), 2, device=rewards.device)
    second_wins = (rewards[1::2] > rewards[::2]).long()
    return first + second_wins, first + 1 - second_wins
