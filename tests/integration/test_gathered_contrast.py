"""The contrastive loss over ranks: their sums, and the gradients of each, are those of one process with all items."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.losses import causal_contrastive

RANK = """
import sys
import torch, torch.distributed as dist
sys.path.insert(0, {tests!r})
from test_gathered_contrast import items, loss_of
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://{file}", rank=rank, world_size=2)
rows = slice(0, 5) if rank == 0 else slice(5, 12)
own = {{name: x[rows].clone() for name, x in items().items()}}
loss, gradients = loss_of(own, gather=True)
torch.save([loss.sum.detach(), loss.count, *gradients], "{file}." + str(rank))
dist.destroy_process_group()
"""


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


def test_ranks_together_have_the_loss_of_one_process(tmp_path):
    code = RANK.format(tests=str(Path(__file__).parent), file=tmp_path / "meeting")
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(rank)]) for rank in range(2)]
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    parts = [torch.load(tmp_path / f"meeting.{rank}") for rank in range(2)]
    whole, gradients = loss_of(items(), gather=True)
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole.sum.detach())
    assert int(parts[0][1] + parts[1][1]) == int(whole.count)
    for i, gradient in enumerate(gradients, 2):
        torch.testing.assert_close(torch.cat([parts[0][i], parts[1][i]]), gradient)
    rows = (slice(0, 5), slice(5, 12))
    apart = [loss_of({name: x[one].clone() for name, x in items().items()}, gather=False)[0] for one in rows]
    assert sum(one.sum.item() for one in apart) != pytest.approx(whole.sum.item())
