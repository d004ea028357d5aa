"""Clips, normalises and centralises a window's gradient between its backward passes and the optimizer's step.

In this order, each only where it is asked for:

    1. division by the window's count
    2. centralisation             train.gradients.centralize     Yong et al. 2020, arXiv 2004.01461, eq. 1
    3. normalisation              train.gradients.normalize      Yu et al. 2017, arXiv 1707.04822, for each parameter
    4. clipping per parameter     train.clip.per_parameter       Pascanu et al. 2013, arXiv 1211.5063, for each
    5. adaptive clipping          train.clip.adaptive            Brock et al. 2021, arXiv 2102.06171, eq. 3
    6. clipping by global norm    train.clip.norm                Pascanu et al. 2013
    7. clipping by value          train.clip.value
    8. noise                      train.gradients.noise          Neelakantan et al. 2015, arXiv 1511.06807, eq. 1

Clipping comes after normalisation, so that it bounds what the optimizer sees; noise comes last, so that its variance
is the one asked for. A unit is what one output is computed with: a row of a matrix, a filter of a convolution; of a
vector, all of it. Sums over units then run over the dimensions from 1 on.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.gradients.accumulate import clip_value_, divide_and_clip
from trainer.ranks import ALONE, Solo
from trainer.runtime.seeding import derive
from trainer.runtime.window import Window

TINY = 1e-6


def centralize_(grads: list[Tensor]) -> None:
    """Take its mean off each unit's gradient; vectors stay as they are."""
    for g in grads:
        if g.ndim > 1:
            g.sub_(g.mean(dim=tuple(range(1, g.ndim)), keepdim=True))


def normalize_(grads: list[Tensor], which: str, ranks: Solo = ALONE) -> None:
    """Divide by the norm of all gradients ("global") or of each ("parameter"), plus 1e-6."""
    norms = [ranks.norm(grads)] * len(grads) if which == "global" else ranks.norms(grads)
    for g, norm in zip(ranks.local(grads), norms, strict=True):
        g.div_(norm + TINY)


def clip_each_(grads: list[Tensor], limit: float, ranks: Solo = ALONE) -> None:
    """Bound the norm of each gradient by `limit`: what torch's clip_grad_norm_ does to a parameter on its own."""
    for g, norm in zip(ranks.local(grads), ranks.norms(grads), strict=True):
        g.mul_((limit / (norm + TINY)).clamp(max=1.0))


def clip_adaptive_(params: Sequence[Tensor], grads: Sequence[Tensor], limit: float, eps: float) -> None:
    """Bound each unit's |g| by limit * max(|w|, eps)."""
    for p, g in zip(params, grads, strict=True):
        most = unit_norms(p).clamp(min=eps) * limit
        norm = unit_norms(g)
        g.mul_(torch.where(norm > most, most / norm.clamp(min=torch.finfo(g.dtype).tiny), 1.0))


def unit_norms(x: Tensor) -> Tensor:
    """The norm of each unit of x [units, ...] as [units, 1, ...]; of a vector or a scalar, its own."""
    return torch.linalg.vector_norm(x, dim=tuple(range(1, x.ndim)) if x.ndim > 1 else None, keepdim=True)


def add_noise_(grads: Sequence[Tensor], eta: float, decay: float, step: int, seed: int) -> None:
    """Add noise of variance eta/(1 + step)^decay to every element: a function of (seed, step) and the device's kind."""
    deviation = math.sqrt(eta / (1 + step) ** decay)
    generators: dict[torch.device, torch.Generator] = {}
    for g in grads:
        if g.device not in generators:
            generators[g.device] = torch.Generator(g.device).manual_seed(derive(seed, "gradient_noise", step))
        noise = torch.randn(g.shape, generator=generators[g.device], device=g.device, dtype=g.dtype)
        g.add_(noise, alpha=deviation)


class GradientRules:
    """The rules of one configuration over the parameters of a model. Raises ConfigError for a pattern of no use."""

    def __init__(
        self, model: nn.Module, params: Sequence[nn.Parameter], config: TrainConfig, ranks: Solo = ALONE
    ) -> None:
        self.params, self.ranks = params, ranks
        self.clip, self.gradients, self.seed = config.clip, config.gradients, config.seed
        names = {p: name for name, p in model.named_parameters()}
        for pattern in config.clip.adaptive_exclude:
            if not any(fnmatchcase(name, pattern) for name in ranks.names(model)):
                known = ", ".join(ranks.names(model)[-3:])
                raise ConfigError(
                    f"train.clip.adaptive_exclude={pattern!r} matches no parameter; the model's last ones are {known}: "
                    "give a pattern that does, or leave it out."
                )
        self.excluded = {
            p for p, name in names.items() if any(fnmatchcase(name, one) for one in config.clip.adaptive_exclude)
        }

    @torch.no_grad()
    def apply(self, window: Window, step: int, *, wait: bool) -> float | Tensor:
        """Divide by the window's count and follow the rules, in place; give the norm after the division alone.

        With `wait` the norm is read, and a float. A count of 0 gives a norm that is not finite.
        """
        c, g = self.clip, self.gradients
        grads = [p.grad for p in self.params if p.grad is not None]
        if not grads or not (g.centralize or g.normalize != "none" or c.per_parameter or c.adaptive):
            norm = divide_and_clip(self.params, window.count, c, wait=wait, ranks=self.ranks)
        else:
            norm = self._all_rules(grads, window, wait=wait)
        if g.noise is not None:
            add_noise_(grads, g.noise, g.noise_decay, step, self.seed)
        return norm

    def _all_rules(self, grads: list[Tensor], window: Window, *, wait: bool) -> float | Tensor:
        c, g = self.clip, self.gradients
        norm = self.ranks.norm(grads) / window.count
        local = self.ranks.local(grads)
        torch._foreach_mul_(
            local, 1 / window.count if isinstance(window.count, Tensor) else 1 / (window.count or math.nan)
        )
        if g.centralize:
            centralize_(grads)
        if g.normalize != "none":
            normalize_(grads, g.normalize, self.ranks)
        if c.per_parameter is not None:
            clip_each_(grads, c.per_parameter, self.ranks)
        if c.adaptive is not None:
            ours = [p for p in self.params if p.grad is not None and p not in self.excluded]
            clip_adaptive_(ours, [p.grad for p in ours if p.grad is not None], c.adaptive, c.adaptive_eps)
        met = self.ranks.norm(grads)
        if c.norm is not None:
            torch._foreach_mul_(local, (c.norm / (met + TINY)).clamp(max=1.0))
        if c.value is not None:
            clip_value_(local, c.value)
        window.met = met
        return norm.item() if wait else norm
