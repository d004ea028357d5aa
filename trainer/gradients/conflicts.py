"""Projects the gradients of a loss's parts off each other where they conflict: `train.gradients.conflicts`.

PCGrad (Yu et al. 2020, arXiv 2001.06782, algorithm 1): for each part i and, in random order, each other one j,

    g_i <- g_i - (g_i . g_j) / |g_j|^2 g_j  where g_i . g_j < 0, with the g_j of before,

and the step is on sum_i g_i. The gradients are those of the whole window, so micro-batches of any size give the same.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.compat import foreach

Order = Callable[[int], Sequence[int]]  # the number of parts -> an order of them, drawn


@torch.no_grad()
def projected(gradients: Sequence[Sequence[Tensor | None]], order: Order) -> tuple[list[Tensor | None], Tensor]:
    """Returns the sum of the parts' projected gradients, by parameter, and the share of conflicts among all pairs.

    A parameter that no part depends on has no gradient; for a part that does not depend on it, it counts as zeros.
    """
    count = len(gradients[0]) if gradients else 0
    used = [i for i in range(count) if any(part[i] is not None for part in gradients)]
    parts = [[_of(part[i], [other[i] for other in gradients]) for i in used] for part in gradients]
    squares = [_dot(part, part) for part in parts]
    moved = [[g.clone() for g in part] for part in parts]
    conflicts: list[Tensor] = []
    for i, part in enumerate(moved):
        for j in order(len(parts)):
            if i != j:
                product = _dot(part, parts[j]).clamp(max=0.0)
                conflicts.append((product < 0).double())
                share = torch.where(squares[j] > 0, product / squares[j], 0.0)
                foreach.sub_(part, foreach.mul(parts[j], share))
    total: list[Tensor | None] = [None] * count
    for k, i in enumerate(used):
        total[i] = torch.stack([part[k] for part in moved]).sum(0)
    return total, torch.stack(conflicts).mean() if conflicts else torch.zeros(())


def _of(gradient: Tensor | None, others: Sequence[Tensor | None]) -> Tensor:
    like = next(other for other in others if other is not None)
    return torch.zeros_like(like) if gradient is None else gradient


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    return torch.stack([product.sum(dtype=torch.float64) for product in foreach.mul([*left], [*right])]).sum()
