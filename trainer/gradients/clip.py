"""Clips, normalises and centralises a window's gradient between its backward passes and the optimizer's step.

In this order, each only if it is set:

    1. division by the window's count
    2. centralisation             train.gradients.centralize     Yong et al. 2020, arXiv 2004.01461, eq. 1
    3. normalisation              train.gradients.normalize      Yu et al. 2017, arXiv 1707.04822, for each parameter
    4. clipping per parameter     train.clip.per_parameter       Pascanu et al. 2013, arXiv 1211.5063, for each
    5. adaptive clipping          train.clip.adaptive            Brock et al. 2021, arXiv 2102.06171, eq. 3
    6. clipping by global norm    train.clip.norm                Pascanu et al. 2013
    7. clipping by value          train.clip.value
    8. noise                      train.gradients.noise          Neelakantan et al. 2015, arXiv 1511.06807, eq. 1

Clipping comes after normalisation, so that it bounds the optimizer's gradient; noise comes last, so that its variance
is the one set. A unit holds the weights of one output: a row of a matrix, a filter of a convolution, or all of a
vector. Sums over a unit run over the dimensions from 1 on.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from trainer.compat import foreach
from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.gradients.accumulate import TINY, clip_value_, divide_and_clip, divide_and_clip_unread
from trainer.ranks import ALONE, Solo
from trainer.runtime.seeding import derive
from trainer.runtime.window import Window


def centralize_(grads: list[Tensor]) -> None:
    """Subtracts the mean of each unit's gradient; vectors stay as they are."""
    for g in grads:
        if g.ndim > 1:
            g.sub_(g.mean(dim=tuple(range(1, g.ndim)), keepdim=True))


def normalize_(grads: list[Tensor], which: str, ranks: Solo = ALONE) -> None:
    """Divides by the norm of all gradients ("global") or of each ("parameter"), plus 1e-6."""
    norms = [ranks.norm(grads)] * len(grads) if which == "global" else ranks.norms(grads)
    for g, norm in zip(ranks.local(grads), norms, strict=True):
        g.div_(norm + TINY)


def clip_each_(grads: list[Tensor], limit: float, ranks: Solo = ALONE) -> None:
    """Bounds the norm of each gradient by `limit`, as torch's clip_grad_norm_ does for a single parameter."""
    for g, norm in zip(ranks.local(grads), ranks.norms(grads), strict=True):
        g.mul_((limit / (norm + TINY)).clamp(max=1.0))


def clip_adaptive_(params: Sequence[Tensor], grads: Sequence[Tensor], limit: float, eps: float) -> None:
    """Bounds each unit's |g| by limit * max(|w|, eps)."""
    for p, g in zip(params, grads, strict=True):
        most = unit_norms(p).clamp(min=eps) * limit
        norm = unit_norms(g)
        g.mul_(torch.where(norm > most, most / norm.clamp(min=torch.finfo(g.dtype).tiny), 1.0))


def unit_norms(x: Tensor) -> Tensor:
    """Returns the norm of each unit of x [units, ...] as [units, 1, ...]; of a vector or a scalar, the whole norm."""
    return torch.linalg.vector_norm(x, dim=tuple(range(1, x.ndim)) if x.ndim > 1 else None, keepdim=True)


def add_noise_(grads: Sequence[Tensor], eta: float, decay: float, step: int, seed: int) -> None:
    """Adds noise of variance eta/(1 + step)^decay to every element: a function of (seed, step) and the device type."""
    deviation = math.sqrt(eta / (1 + step) ** decay)
    generators: dict[torch.device, torch.Generator] = {}
    for g in grads:
        if g.device not in generators:
            generators[g.device] = torch.Generator(g.device).manual_seed(derive(seed, "gradient_noise", step))
        noise = torch.randn(g.shape, generator=generators[g.device], device=g.device, dtype=g.dtype)
        g.add_(noise, alpha=deviation)


class GradientRules:
    """The rules of one configuration for a model's parameters. Raises ConfigError for a pattern without a match."""

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
            p
            for p, name in names.items()
            if any(fnmatchcase(name, pattern) for pattern in config.clip.adaptive_exclude)
        }

    @torch.no_grad()
    def apply(self, window: Window, step: int, *, wait: bool) -> float | Tensor:
        """Divides by the window's count and applies the rules, in place; returns the norm after the division alone.

        With `wait` the norm is read, and a float. Without, it may be left undivided: `window.norm_divisor` then has the
        divisor. A count of 0 gives a norm that is not finite.
        """
        c, g = self.clip, self.gradients
        grads = [p.grad for p in self.params if p.grad is not None]
        if not grads or not (g.centralize or g.normalize != "none" or c.per_parameter or c.adaptive):
            norm = self._divided(window, wait=wait)
        else:
            norm = self._all_rules(grads, window, wait=wait)
        if g.noise is not None:
            add_noise_(grads, g.noise, g.noise_decay, step, self.seed)
        return norm

    def _divided(self, window: Window, *, wait: bool) -> float | Tensor:
        if wait:
            return divide_and_clip(self.params, window.count, self.clip, self.ranks)
        norm, window.norm_divisor = divide_and_clip_unread(self.params, window.count, self.clip, self.ranks)
        return norm

    def _all_rules(self, grads: list[Tensor], window: Window, *, wait: bool) -> float | Tensor:
        c, g = self.clip, self.gradients
        norm = self.ranks.norm(grads) / window.count
        local = self.ranks.local(grads)
        foreach.mul_(local, 1 / window.count if isinstance(window.count, Tensor) else 1 / (window.count or math.nan))
        if g.centralize:
            centralize_(grads)
        if g.normalize != "none":
            normalize_(grads, g.normalize, self.ranks)
        if c.per_parameter is not None:
            clip_each_(grads, c.per_parameter, self.ranks)
        if c.adaptive is not None:
            clipped = [p for p in self.params if p.grad is not None and p not in self.excluded]
            clip_adaptive_(clipped, [p.grad for p in clipped if p.grad is not None], c.adaptive, c.adaptive_eps)
        before = self.ranks.norm(grads)
        if c.norm is not None:
            foreach.mul_(local, (c.norm / (before + TINY)).clamp(max=1.0))
        if c.value is not None:
            clip_value_(local, c.value)
        window.met = before
        return norm.item() if wait else norm
