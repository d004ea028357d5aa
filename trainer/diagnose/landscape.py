"""The loss around a trained model, along random directions with the filters' own scale (Li et al. 2018,
arXiv 1712.09913, section 4)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.diagnose.flow import LossOf
from trainer.seeding import derive


@dataclass(frozen=True)
class Landscape:
    """`losses[i]` or `losses[i][j]`: the mean loss at `offsets[i]` along the first direction, `offsets[j]` along the
    second. Offset 0 is the model itself."""

    offsets: list[float]
    losses: list[Any]


def landscape(
    model: nn.Module,
    loss_of: LossOf,
    batches: Sequence[Any],
    *,
    dims: int = 1,
    span: float = 1.0,
    points: int = 21,
    seed: int = 0,
) -> Landscape:
    """The mean loss over `batches`, in eval mode, at `points` offsets from -span to span; `model` is not changed."""
    model = copy.deepcopy(model).eval()
    centre = [p.detach().clone() for p in model.parameters()]
    directions = [direction(centre, derive(seed, "landscape", k)) for k in range(dims)]
    offsets = torch.linspace(-span, span, points, dtype=torch.float64).tolist()

    def along(at: tuple[float, ...]) -> Any:
        if len(at) < dims:
            return [along((*at, offset)) for offset in offsets]
        return _loss_at(model, centre, directions, at, loss_of, batches)

    return Landscape(offsets, along(()))


def direction(centre: Sequence[Tensor], seed: int) -> list[Tensor]:
    """A Gaussian direction whose filters have the norms of the model's own; 0 for biases and norms' parameters.

    A filter is what makes one output: a row of a matrix, one output channel of a convolution.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for p in centre:
        if p.ndim < 2:
            found.append(torch.zeros_like(p))
            continue
        d = torch.randn(p.shape, generator=generator).to(p)
        rest = tuple(range(1, p.ndim))
        found.append(d * (p.norm(dim=rest, keepdim=True) / (d.norm(dim=rest, keepdim=True) + 1e-10)))
    return found


@torch.no_grad()
def _loss_at(
    model: nn.Module,
    centre: Sequence[Tensor],
    directions: Sequence[Sequence[Tensor]],
    at: Sequence[float],
    loss_of: LossOf,
    batches: Sequence[Any],
) -> float:
    for k, (p, c) in enumerate(zip(model.parameters(), centre, strict=True)):
        p.copy_(c + sum(offset * d[k] for offset, d in zip(at, directions, strict=True)))
    losses = [loss_of(model, batch) for batch in batches]
    return float(sum(loss.sum.item() for loss in losses) / sum(float(loss.count) for loss in losses))


def sharpness(found: Landscape) -> float:
    """How much the loss has risen at half the span, relative to the loss itself; of a 1-D landscape."""
    n = len(found.offsets)
    middle, quarter = n // 2, n // 4
    rise = (found.losses[middle - quarter] + found.losses[middle + quarter]) / 2 - found.losses[middle]
    return rise / max(abs(found.losses[middle]), 1e-12)
