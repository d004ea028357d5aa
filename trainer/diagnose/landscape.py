"""Measures the loss around a trained model, along random directions scaled by the filters' norms.

Li et al. 2018, arXiv 1712.09913, section 4.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.finding import Finding
from trainer.runtime.seeding import derive
from trainer.task import Loss

LossOf = Callable[[nn.Module, Any], Loss]

# Rules of thumb. Well-trained perceptrons of one to four layers on the digits, and atft, lose 0.07 to 0.15 of their
# gain half a filter's norm away, small ones with noisy targets up to 0.5; trained at a learning rate of 1, mostly 0.6
# to 2.4. After an epoch or two, random steps gain up to a further 0.08.
SHARP, SLOPED = 0.5, 0.05
LEARNED = 0.01  # of the untrained model's loss: a smaller gain cannot be measured by
CHECK = "loss landscape"


@dataclass(frozen=True)
class Landscape:
    """The mean losses around a model; offset 0 is the model itself.

    `losses[i]` or `losses[i][j]` is the loss at `offsets[i]` along the first direction, `offsets[j]` along the second.
    """

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
    """Returns the mean loss over `batches`, in eval mode, at `points` offsets from -span to span.

    `model` is not changed.
    """
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
    """Returns a Gaussian direction whose filters have the norms of the model's; 0 for biases and norms' parameters.

    A filter computes one output: a row of a matrix, one output channel of a convolution.
    """
    generator = torch.Generator().manual_seed(seed)
    scaled = []
    for p in centre:
        if p.ndim < 2:
            scaled.append(torch.zeros_like(p))
            continue
        d = torch.randn(p.shape, generator=generator).to(p)
        rest = tuple(range(1, p.ndim))
        scaled.append(d * (p.norm(dim=rest, keepdim=True) / (d.norm(dim=rest, keepdim=True) + 1e-10)))
    return scaled


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
    return mean_loss(model, loss_of, batches)


@torch.no_grad()
def mean_loss(model: nn.Module, loss_of: LossOf, batches: Sequence[Any]) -> float:
    """Returns the mean loss over `batches`, in the mode the model is in."""
    losses = [loss_of(model, batch) for batch in batches]
    return float(sum(loss.sum.item() for loss in losses) / sum(float(loss.count) for loss in losses))


def lines(found: Landscape) -> list[list[float]]:
    """Returns the losses of a 2-D landscape along each direction alone."""
    losses, middle = np.asarray(found.losses), len(found.offsets) // 2
    return [losses[:, middle].tolist(), losses[middle, :].tolist()]


def finding(found: Landscape, untrained: float) -> Finding:
    """Returns the finding on a 2-D landscape, in shares of training's gain since the loss was `untrained`."""
    along, n = lines(found), len(found.offsets)
    middle, quarter = n // 2, n // 4
    centre, lowest = along[0][middle], float(np.min(found.losses))
    gained, away = untrained - centre, abs(found.offsets[middle + quarter])
    if not gained > LEARNED * abs(untrained) or not np.isfinite(found.losses).all():
        return Finding(
            CHECK,
            "nothing learned",
            f"the loss is {centre:.4g}, before training it was {untrained:.4g} (little under {LEARNED:.0%} less)",
            gained,
            "train for longer, and take the learning rate that `hpo lr-find` suggests.",
        )
    lost = fmean(line[middle + side] - centre for line in along for side in (-quarter, quarter)) / gained
    figure = f"{lost:.0%} of what training has gained is lost {away:g} filter norms away (sharp over {SHARP:.0%})"
    if (below := (centre - lowest) / gained) > SLOPED:
        return Finding(
            CHECK,
            "on a slope",
            f"a random step gains {below:.0%} of what training has gained (no minimum over {SLOPED:.0%}); {figure}",
            below,
            "train for longer (train.num_epochs), or at the train.optim.lr that `hpo lr-find` suggests.",
        )
    if lost > SHARP:
        return Finding(
            CHECK,
            "sharp",
            figure,
            lost,
            "seek a flatter minimum by train.optim.wrap=sam, train.average.name=swa or a smaller train.batch_size.",
        )
    return Finding(CHECK, "healthy", figure, lost)
