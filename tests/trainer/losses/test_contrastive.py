"""The contrastive loss over ranks: their sums, and the gradients of each, are those of one process with all items."""

from __future__ import annotations

import pytest
import torch
from contrast_ranks import ROWS, items, loss_of

from trainer.config import ParallelConfig
from trainer.distributed.launch import launch

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("ranks")]


def test_ranks_together_have_the_loss_of_one_process():
    parts = launch("contrast_ranks:of_this_rank", {}, ParallelConfig(data=2), device="cpu")
    whole, gradients = loss_of(items(), gather=True)
    assert parts[0][0] + parts[1][0] == pytest.approx(whole.sum.item(), rel=1e-7)
    assert parts[0][1] + parts[1][1] == int(whole.count)
    for i, gradient in enumerate(gradients, 2):
        torch.testing.assert_close(torch.tensor([*parts[0][i], *parts[1][i]], dtype=torch.float64), gradient)
    apart = [loss_of({name: x[rows].clone() for name, x in items().items()}, gather=False)[0] for rows in ROWS]
    assert sum(one.sum.item() for one in apart) != pytest.approx(whole.sum.item())
