"""PowerSGD: replicas send two thin factors of each gradient matrix, and add the error to their next gradient.

Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2.

With S replicas, g_w the gradient of the summed loss [n, m] on replica w, N the window's global count and e_w the error
left out so far:

    M_w = S/N g_w + e_w             whose mean over w is the gradient of the mean loss plus the error left out of it
    P = orthogonal(mean_w M_w Q)    [n, r]
    Q = mean_w M_w^T P              [m, r], kept for the next window
    e_w = M_w - P Q^T

torch's hook works bucket by bucket during backward. Its callbacks start collectives from gloo's threads, in an order
that differs from rank to rank, and it keeps the error of sums, although windows differ in their number of samples.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.runtime.seeding import derive


class PowerSGD:
    """Reduces the gradients of `model` over `shares` replicas by `add_up`, those of matrices at rank `rank`.

    Vectors, and matrices whose factors would not be smaller, are sent as they are.
    """

    def __init__(self, model: nn.Module, rank: int, shares: int, add_up: Callable[[list[Tensor]], None]) -> None:
        self._shares, self._add_up = shares, add_up
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._matrices = {name: p for name, p in trainable.items() if _pays(p, rank)}
        self._others = [p for name, p in trainable.items() if name not in self._matrices]
        self._left_out = {name: torch.zeros_like(p).flatten(1) for name, p in self._matrices.items()}
        self._right = {name: _drawn(name, e.shape[1], rank).to(e) for name, e in self._left_out.items()}

    @torch.no_grad()
    def reduce(self, count: float | Tensor) -> None:
        """Replaces each gradient by its sum over all replicas, or by the low-rank part of it that is sent.

        A gradient that is not finite on any replica becomes NaN on all, and does not enter the errors and factors kept.
        """
        self._add_up([p.grad for p in self._others if p.grad is not None])
        names = [name for name, p in self._matrices.items() if p.grad is not None]
        if not names:
            return
        scale = self._shares / (count if isinstance(count, Tensor) else count or math.nan)
        corrected = [self._gradient(name).flatten(1) * scale + self._left_out[name] for name in names]
        left = self._mean([m @ self._right[name] for name, m in zip(names, corrected, strict=True)])
        finite = torch.stack([p.isfinite().all() for p in left]).all()
        left = [torch.linalg.qr(torch.where(finite, p, 0.0)).Q for p in left]
        right = self._mean([m.T @ p for m, p in zip(corrected, left, strict=True)])
        for name, m, p, q in zip(names, corrected, left, right, strict=True):
            sent, gradient = p @ q.T, self._gradient(name)
            gradient.copy_(torch.where(finite, sent * count, math.nan).view_as(gradient))
            self._left_out[name] = torch.where(finite, m - sent, self._left_out[name])
            self._right[name] = torch.where(finite, q, self._right[name])

    def _gradient(self, name: str) -> Tensor:
        gradient = self._matrices[name].grad
        assert gradient is not None
        return gradient

    def _mean(self, tensors: list[Tensor]) -> list[Tensor]:
        self._add_up(tensors)
        return [t / self._shares for t in tensors]

    def state(self, stacked: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Returns the factors, and the errors of all replicas as `stacked` joins them."""
        return {"left_out": {name: stacked(e) for name, e in self._left_out.items()}, "right": dict(self._right)}

    def load(self, state: dict[str, Any], share: int) -> None:
        """Loads the factors and the errors.

        Replica `share` takes its own error, or the mean if the number of replicas differs.
        """
        for name, e in self._left_out.items():
            errors, right = state["left_out"].get(name), state["right"].get(name)
            if errors is not None and errors.shape[1:] == e.shape:
                e.copy_(errors[share] if len(errors) == self._shares else errors.mean(0))
            if right is not None and right.shape == self._right[name].shape:
                self._right[name].copy_(right)


def _pays(p: Tensor, rank: int) -> bool:
    if p.ndim < 2:
        return False
    n, m = p.flatten(1).shape
    return (n + m) * rank < n * m


def _drawn(name: str, m: int, rank: int) -> Tensor:
    """Returns the first factor, which is the same on all replicas."""
    return torch.randn(m, rank, generator=torch.Generator().manual_seed(derive(0, f"powersgd/{name}")))
