"""What the ranks of a test do: the contrastive loss of their own items, and its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.distributed.member import this
from trainer.losses import causal_contrastive

ROWS = (slice(0, 5), slice(5, 12))  # a rank's own


def of_this_rank(job: dict[str, Any]) -> list[Any]:
    """Called on each rank: its sum, its count and the gradients of its own items."""
    member = this()
    assert member is not None
    loss, gradients = loss_of({name: x[ROWS[member.rank]].clone() for name, x in items().items()}, gather=True)
    return [loss.sum.item(), int(loss.count), *(gradient.tolist() for gradient in gradients)]


def items() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "anchors": torch.randn(12, 6, generator=generator, dtype=torch.float64),
        "positives": torch.randn(12, 6, generator=generator, dtype=torch.float64),
        "valid": torch.arange(12) != 7,
        "times": torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]),
        "groups": torch.tensor([0, 1, 2, 1, 3, 4, 5, 6, 0, 7, 8, 1]),
    }


def loss_of(own: dict[str, Tensor], *, gather: bool):
    anchors, positives = (own.pop(name).requires_grad_() for name in ("anchors", "positives"))
    loss = causal_contrastive(anchors, positives, temperature=0.2, gather=gather, **own)
    return loss, torch.autograd.grad(loss.sum, [anchors, positives])
