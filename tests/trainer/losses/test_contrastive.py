"""The contrastive loss over ranks: their sums, and the gradients of each, are those of one process with all items."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.config import ParallelConfig
from trainer.distributed.launch import launch
from trainer.distributed.member import this
from trainer.losses import causal_contrastive

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("ranks")]

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


def test_ranks_together_have_the_loss_of_one_process():
    parts = launch("test_gathered_contrast:of_this_rank", {}, ParallelConfig(data=2), device="cpu")
    whole, gradients = loss_of(items(), gather=True)
    assert parts[0][0] + parts[1][0] == pytest.approx(whole.sum.item(), rel=1e-7)
    assert parts[0][1] + parts[1][1] == int(whole.count)
    for i, gradient in enumerate(gradients, 2):
        torch.testing.assert_close(torch.tensor([*parts[0][i], *parts[1][i]], dtype=torch.float64), gradient)
    apart = [loss_of({name: x[rows].clone() for name, x in items().items()}, gather=False)[0] for rows in ROWS]
    assert sum(one.sum.item() for one in apart) != pytest.approx(whole.sum.item())
