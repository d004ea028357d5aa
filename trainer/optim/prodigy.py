"""Prodigy: Adam whose learning rate is an estimate of the distance to the solution."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trainer.compat import foreach
from trainer.optim.base import Own


class Prodigy(Own):
    """Mishchenko & Defazio 2024, arXiv 2306.06101, algorithm 4, with decoupled decay:

    m <- beta1 m + (1 - beta1) d g,  v <- beta2 v + (1 - beta2) d^2 g^2,  b = sqrt(beta2),
    r <- b r + (1 - b) lr d^2 <g, p_0 - p>,  s <- b s + (1 - b) lr d^2 g,
    p <- (1 - lr d wd) p - lr d m / (sqrt(v) + d eps),  d <- max(d, d_coef r / |s|_1).

    The product and the norm are over all parameters, so d and r are the same in all groups. Both r and s are kept
    divided by 1 - b, which cancels.
    """

    def __init__(self, groups: list[dict[str, Any]], **hyperparameters: Any) -> None:
        super().__init__(groups, **hyperparameters)
        for group in self.param_groups:
            group |= {"d": group["d0"], "r": 0.0}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes none
        batches, first = list(self.batches()), self.param_groups[0]
        products: list[Tensor] = []
        norms: list[Tensor] = []
        for params, grads, group in batches:
            products += self._observe(params, grads, group)
            norms += foreach.norm([self.state[p]["s"] for p in params], 1)
            self.update(params, grads, group)
        if not batches:
            return
        r = math.sqrt(first["betas"][1]) * first["r"] + _total(products)
        norm, d = _total(norms), first["d"]
        if norm:
            d = max(d, first["d_coef"] * r / norm)
        for group in self.param_groups:
            group |= {"d": d, "r": r}

    def _observe(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Updates s; returns what each parameter adds to r."""
        for p in params:
            if "start" not in self.state[p]:
                self.state[p]["start"] = torch.clone(p, memory_format=torch.contiguous_format)
        gain = group["lr"] * group["d"] ** 2
        s = self.buffers("s", params)
        foreach.mul_(s, math.sqrt(group["betas"][1]))
        foreach.add_(s, grads, alpha=gain)
        products = foreach.sub([self.state[p]["start"] for p in params], params)
        foreach.mul_(products, grads)
        return [product.sum(dtype=torch.float64) * gain for product in products]

    def update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        m, v = self.buffers("exp_avg", params), self.buffers("exp_avg_sq", params)
        (beta1, beta2), d = group["betas"], group["d"]
        foreach.mul_(m, beta1)
        foreach.add_(m, grads, alpha=(1 - beta1) * d)
        foreach.mul_(v, beta2)
        foreach.addcmul_(v, grads, grads, (1 - beta2) * d**2)
        root = foreach.sqrt(v)
        foreach.add_(root, d * group["eps"])
        if group["weight_decay"]:
            foreach.mul_(params, 1 - group["lr"] * d * group["weight_decay"])
        steps = foreach.div(m, root)
        foreach.add_(params, steps, alpha=-group["lr"] * d)


def _total(numbers: list[Tensor]) -> float:
    """Returns the sum in double precision, in the order of the parameters."""
    return float(torch.stack([number.double() for number in numbers]).sum())
