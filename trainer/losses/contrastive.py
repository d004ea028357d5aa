"""The causal contrastive loss: InfoNCE in which nothing that comes later serves as a negative."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.losses.base import full_precision, same_shape, zeroed
from trainer.task import Loss


@full_precision
def causal_contrastive(
    anchors: Tensor,
    positives: Tensor,
    valid: Tensor | None = None,
    *,
    times: Tensor | None = None,
    groups: Tensor | None = None,
    temperature: float = 0.07,
) -> Loss:
    """-log exp(s_ii / t) / sum_j exp(s_ij / t), s the cosine of anchor i and positive j (van den Oord et al. 2018,
    arXiv 1807.03748, eq. 4; the temperature and the cosine of Chen et al. 2020, arXiv 2002.05709, eq. 1).

    anchors, positives: [n, features]; valid: [n]; times: [n], of the positives: j is a negative of i only where
    times[j] <= times[i], so that no anchor is told from what it cannot know of; groups: [n], whole numbers: items of
    one group are not negatives of each other. For a sequence model, n runs over (sequence, position), so that a batch
    of one sequence has negatives of its own.

    The count is of valid anchors with at least one negative; where there is none, as in a batch of one item, sum and
    count are 0. The negatives come from the micro-batch: its size is part of the loss, and accumulation over smaller
    micro-batches is another loss, not an approximation error.
    """
    same_shape(anchors=anchors, positives=positives)
    n = len(anchors)
    valid = torch.ones(n, dtype=torch.bool, device=anchors.device) if valid is None else valid
    a, b = zeroed(valid[:, None], anchors, positives)
    similarity = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T / temperature
    own = torch.eye(n, dtype=torch.bool, device=anchors.device)
    negative = valid[:, None] & valid & ~own
    if times is not None:
        negative &= times <= times[:, None]
    if groups is not None:
        negative &= groups != groups[:, None]
    counted = negative.any(dim=1)
    log_p = similarity.diagonal() - similarity.masked_fill(~(negative | own), -torch.inf).logsumexp(dim=1)
    hit = similarity.diagonal() >= similarity.masked_fill(~negative, -torch.inf).amax(dim=1)
    return Loss(-torch.where(counted, log_p, 0.0).sum(), counted.sum(), {"contrastive_accuracy": (hit & counted).sum()})
