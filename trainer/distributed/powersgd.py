"""PowerSGD (Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2): replicas send two thin factors of each matrix of
gradients, and each adds what that left out to its next gradient.

With S replicas, g_w the gradient of the summed loss [n, m] on replica w, N the window's global count and e_w what has
been left out:

    M_w = S/N g_w + e_w             whose mean over w is the gradient of the mean loss, and what was left out of it
    P = orthogonal(mean_w M_w Q)    [n, r]
    Q = mean_w M_w^T P              [m, r], kept for the next window
    e_w = M_w - P Q^T

torch's hook does it bucket by bucket while backward goes on. Its callbacks start collectives from the threads of gloo,
in an order that differs from rank to rank, and it keeps what is left out of sums, of which windows hold unlike many.
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
    """The gradients of `model`, summed over `shares` replicas by `add_up`, with those of matrices at rank `rank`.

    Vectors, and matrices whose factors would be no smaller, are sent as they are.
    """

    def __init__(self, model: nn.Module, rank: int, shares: int, add_up: Callable[[list[Tensor]], None]) -> None:
        self._shares, self._add_up = shares, add_up
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._matrices = {name: p for name, p in trained.items() if _pays(p, rank)}
        self._others = [p for name, p in trained.items() if name not in self._matrices]
        self._left_out = {name: torch.zeros_like(p).flatten(1) for name, p in self._matrices.items()}
        self._right = {name: _drawn(name, e.shape[1], rank).to(e) for name, e in self._left_out.items()}

    @torch.no_grad()
    def reduce(self, count: float | Tensor) -> None:
        """Put the sum over all replicas, or what is sent of it, in place of each gradient. What is not finite on any of
        them becomes NaN on all, and leaves no trace in what is kept."""
        self._add_up([p.grad for p in self._others if p.grad is not None])
        names = [name for name, p in self._matrices.items() if p.grad is not None]
        if not names:
            return
        scale = self._shares / (count if isinstance(count, Tensor) else count or math.nan)
        given = [self._gradient(name).flatten(1) * scale + self._left_out[name] for name in names]
        left = self._mean([m @ self._right[name] for name, m in zip(names, given, strict=True)])
        finite = torch.stack([p.isfinite().all() for p in left]).all()
        left = [torch.linalg.qr(torch.where(finite, p, 0.0)).Q for p in left]
        right = self._mean([m.T @ p for m, p in zip(given, left, strict=True)])
        for name, m, p, q in zip(names, given, left, right, strict=True):
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
        """With what all replicas have left out, `stacked` on top of one another."""
        return {"left_out": {name: stacked(e) for name, e in self._left_out.items()}, "right": dict(self._right)}

    def load(self, state: dict[str, Any], share: int) -> None:
        """Of what was left out, replica `share` takes its own; of another number of replicas, the mean."""
        for name, e in self._left_out.items():
            of_all, right = state["left_out"].get(name), state["right"].get(name)
            if of_all is not None and of_all.shape[1:] == e.shape:
                e.copy_(of_all[share] if len(of_all) == self._shares else of_all.mean(0))
            if right is not None and right.shape == self._right[name].shape:
                self._right[name].copy_(right)


def _pays(p: Tensor, rank: int) -> bool:
    if p.ndim < 2:
        return False
    n, m = p.flatten(1).shape
    return (n + m) * rank < n * m


def _drawn(name: str, m: int, rank: int) -> Tensor:
    """The first factor: the same on all replicas."""
    return torch.randn(m, rank, generator=torch.Generator().manual_seed(derive(0, f"powersgd/{name}")))
