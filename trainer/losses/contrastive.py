"""Holds the causal contrastive loss: InfoNCE without later items as negatives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
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
    gather: bool = False,
) -> Loss:
    """Returns the loss -log exp(s_ii / t) / sum_j exp(s_ij / t), s the cosine of anchor i and positive j.

    It is van den Oord et al. 2018, arXiv 1807.03748, eq. 4, with the temperature and the cosine of Chen et al. 2020,
    arXiv 2002.05709, eq. 1.

    anchors, positives: [n, features]; valid: [n]; times: [n], of the positives: j is a negative of i only where
    times[j] <= times[i], so that no anchor is compared with its future; groups: [n], whole numbers: items of one group
    are not negatives of each other. For a sequence model, n runs over (sequence, position), so that a batch of one
    sequence has negatives too.

    With `gather` negatives also come from the other ranks of torch.distributed, if there are any: each rank calls this
    for its anchors, at the same point. Gradients go back to the rank that a positive came from, so that the sums
    of all ranks together are the loss of all their items in one process.

    The count is the number of valid anchors with at least one negative; without any, as in a batch of one item, sum and
    count are 0. The negatives come from the micro-batch: its size is part of the loss, and accumulation over smaller
    micro-batches is another loss, not an approximation error.
    """
    same_shape(anchors=anchors, positives=positives)
    n = len(anchors)
    valid = torch.ones(n, dtype=torch.bool, device=anchors.device) if valid is None else valid
    a, b = zeroed(valid[:, None], anchors, positives)
    everyone = _Ranks(n, anchors.device, gather)
    similarity = F.normalize(a, dim=-1) @ everyone.all(F.normalize(b, dim=-1)).T / temperature
    columns = torch.arange(similarity.shape[1], device=anchors.device)
    matching = columns == everyone.first + torch.arange(n, device=anchors.device)[:, None]
    negative = valid[:, None] & everyone.all(valid) & ~matching
    if times is not None:
        negative &= everyone.all(times) <= times[:, None]
    if groups is not None:
        negative &= everyone.all(groups) != groups[:, None]
    counted = negative.any(dim=1)
    positive = similarity.diagonal(everyone.first)
    log_p = positive - similarity.masked_fill(~(negative | matching), -torch.inf).logsumexp(dim=1)
    closest = similarity.masked_fill(~negative, -torch.inf)
    hit = positive >= (closest.amax(dim=1) if n else positive)
    return Loss(-torch.where(counted, log_p, 0.0).sum(), counted.sum(), {"contrastive_accuracy": (hit & counted).sum()})


class _Ranks:
    """The items of all ranks in rank order, with this rank's n from `first`; without `gather` only these n."""

    def __init__(self, n: int, device: torch.device, gather: bool) -> None:
        self.gather = gather and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.sizes, self.first = [n], 0
        if self.gather:
            counts = torch.zeros(dist.get_world_size(), dtype=torch.long, device=device)
            counts[dist.get_rank()] = n
            dist.all_reduce(counts)
            self.sizes = counts.tolist()
            self.first = sum(self.sizes[: dist.get_rank()])

    def all(self, x: Tensor) -> Tensor:
        """Returns [all ranks' items, ...] for [this rank's items, ...]."""
        return _Gathered.apply(x, self.first, sum(self.sizes)) if self.gather else x  # type: ignore[return-value]


class _Gathered(torch.autograd.Function):
    """Sums over the ranks tensors that are 0 outside each rank's rows, and their gradients in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: int, total: int) -> Tensor:
        ctx.rows = slice(first, first + len(x))
        gathered = x.new_zeros((total, *x.shape[1:]), dtype=torch.uint8 if x.dtype == torch.bool else x.dtype)
        gathered[ctx.rows] = x
        dist.all_reduce(gathered)
        return gathered.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        total = gradients[0].contiguous()
        dist.all_reduce(total)
        return total[ctx.rows], None, None
