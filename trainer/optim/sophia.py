"""Sophia-H: momentum over an estimate of the curvature, clipped."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from trainer.compat import foreach
from trainer.optim.base import Own, decay
from trainer.runtime.second_order import twice
from trainer.task import Loss


class Sophia(Own):
    """Liu et al. 2024, arXiv 2305.14342, algorithm 3, with the estimator of algorithm 1 (Hutchinson):

    m <- beta1 m + (1 - beta1) g,  every k steps h <- beta2 h + (1 - beta2) u (H u) with u ~ N(0, 1),
    p <- (1 - lr wd) p - lr clip(m / max(gamma h, eps), 1).

    The training loop calls `observe` for every window that is `due`, and `forget` before the others.
    """

    curvature: Mapping[Tensor, Tensor] = MappingProxyType({})  # of the current window, by parameter

    def due(self, step: int) -> bool:
        """Returns True if the curvature is to be estimated at `step`."""
        return step % self.param_groups[0]["update_every"] == 0

    def forget(self) -> None:
        """Drops the last estimate, used or not, so that the next step keeps the curvature as it is."""
        self.curvature = {}

    def observe(
        self,
        losses: Iterable[Loss],
        count: float | Tensor,
        seed: int,
        add_up: Callable[[Sequence[Tensor]], None] = lambda _: None,
    ) -> Tensor:
        """Estimates the diagonal of the Hessian of sum(losses)/count for the next step, and returns its norm.

        `add_up` replaces each tensor by its sum over all ranks. One u serves all losses, so that the division of a
        window into micro-batches and shares affects only rounding. Raises ConfigError if the model has no second
        derivative.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        generator = torch.Generator().manual_seed(seed)
        us = [torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device) for p in params]
        total = [torch.zeros_like(p) for p in params]
        with twice("optim.name=sophia", "choose adamw or lion"):
            for loss in losses:
                foreach.add_(total, _products(loss.sum, params, us))
        add_up(total)
        foreach.mul_(total, us)
        foreach.div_(total, count)
        self.curvature = dict(zip(params, total, strict=True))
        return torch.nn.utils.get_total_norm(total)

    def update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        m, h = self.buffers("exp_avg", params), self.buffers("hessian", params)
        beta1, beta2 = group["betas"]
        foreach.lerp_(m, grads, 1 - beta1)
        if self.curvature:
            foreach.lerp_(h, [self.curvature[p] for p in params], 1 - beta2)
        scaled = foreach.mul(h, group["gamma"])
        foreach.clamp_min_(scaled, group["eps"])
        steps = foreach.div(m, scaled)
        foreach.clamp_min_(steps, -1.0)
        foreach.clamp_max_(steps, 1.0)
        decay(params, group)
        foreach.add_(params, steps, alpha=-group["lr"])


def _products(loss: Tensor, params: list[Tensor], us: list[Tensor]) -> list[Tensor]:
    """Returns H u, with H the Hessian of `loss`; zeros where the loss is constant or linear in a parameter."""
    zeros = [torch.zeros_like(p) for p in params]
    if not loss.requires_grad:
        return zeros
    grads = torch.autograd.grad(loss, params, create_graph=True, materialize_grads=True)
    inner = sum((g * u).sum() for g, u in zip(grads, us, strict=True))
    if not isinstance(inner, Tensor) or not inner.requires_grad:
        return zeros
    return list(torch.autograd.grad(inner, params, materialize_grads=True))
