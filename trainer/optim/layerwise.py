"""Holds LARS and LAMB: each layer's step is scaled to the norm of its weights, for large batches.

Norms, biases and other vectors take steps of ratio 1, as in the authors' code and those that followed it.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.compat import foreach
from trainer.optim.base import Own


def _ratios(weights: list[Tensor], steps: Any) -> list[Tensor]:
    """Returns |w| / |step| of each layer; 1 where either is 0."""
    pairs = zip(foreach.norm(weights), foreach.norm(steps), strict=True)
    return [torch.where((w > 0) & (s > 0), w / s, torch.ones_like(w)) for w, s in pairs]


class Lamb(Own):
    """You et al. 2020, arXiv 1904.00962, algorithm 2 with phi(x) = x:

    r = m'/(sqrt(v') + eps) + wd p with Adam's m' and v',  p <- p - lr (|p| / |r|) r.
    """

    def update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        m, v = self.buffers("exp_avg", params), self.buffers("exp_avg_sq", params)
        steps, (beta1, beta2) = self.count(params), group["betas"]
        foreach.lerp_(m, grads, 1 - beta1)
        foreach.mul_(v, beta2)
        foreach.addcmul_(v, grads, grads, 1 - beta2)
        r = foreach.div(m, [1 - beta1**t for t in steps])
        root = foreach.sqrt(foreach.div(v, [1 - beta2**t for t in steps]))
        foreach.add_(root, group["eps"])
        foreach.div_(r, root)
        if group["weight_decay"]:
            foreach.add_(r, params, alpha=group["weight_decay"])
        if not group["vector"]:
            foreach.mul_(r, _ratios(params, r))
        foreach.add_(params, r, alpha=-group["lr"])


class Lars(Own):
    """You, Gitman & Ginsburg 2017, arXiv 1708.03888, algorithm 1:

    l = eta |p| / (|g| + wd |p|),  v <- mu v + lr l (g + wd p),  p <- p - v, with eta the trust coefficient.
    """

    def update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        velocity = self.buffers("momentum_buffer", params)
        scaled = foreach.add(grads, params, alpha=group["weight_decay"])
        if not group["vector"]:
            foreach.mul_(scaled, self._local(params, grads, group))
        foreach.mul_(velocity, group["momentum"])
        foreach.add_(velocity, scaled, alpha=group["lr"])
        foreach.sub_(params, velocity)

    def _local(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Returns the local learning rate of each layer; 1 where its weights or its gradient are 0."""
        pairs = zip(foreach.norm(params), foreach.norm(grads), strict=True)
        trust, decay = group["trust_coefficient"], group["weight_decay"]
        return [torch.where((w > 0) & (g > 0), trust * w / (g + decay * w), torch.ones_like(w)) for w, g in pairs]
