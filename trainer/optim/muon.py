"""Combines Muon for the hidden matrices and AdamW for all else in one optimizer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, optim

from trainer.optim.base import Own, decay, divided_as
from trainer.optim.unwrapped_step import unmarked


def orthogonalised(x: Tensor, steps: int) -> Tensor:
    """Returns about U V^T for x [rows, columns] = U S V^T, by quintic Newton-Schulz iterations; singular values near 1.

    It computes in bf16 on a GPU, as its authors do, and elsewhere in the dtype of x, since bf16 products are slow
    without hardware for them.
    """
    wide = x.shape[0] <= x.shape[1]
    y = (x if wide else x.T).to(torch.bfloat16 if x.device.type == "cuda" else x.dtype)
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = y @ y.T
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return (y if wide else y.T).to(x.dtype)


class _Matrices(Own):
    """v <- mu v + (1 - mu) g,  p <- (1 - lr wd) p - 0.2 sqrt(max(rows, columns)) lr O(v), or O((1 - mu) g + mu v)."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, foreach=False)

    def update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        [p], [g], [v] = params, grads, self.buffers("momentum_buffer", params)
        v.lerp_(g, 1 - group["momentum"])
        step = orthogonalised(g.lerp(v, group["momentum"]) if group["nesterov"] else v, group["ns_steps"])
        decay(params, group)
        p.add_(divided_as(step, p), alpha=-0.2 * math.sqrt(max(p.shape)) * group["lr"])


class Muon(optim.Optimizer):
    """Jordan et al. 2024 (kellerjordan.github.io/posts/muon): momentum, orthogonalised by Newton-Schulz iterations.

    A matrix's update is scaled by 0.2 sqrt(max(rows, columns)), so that its RMS is that of AdamW's and one learning
    rate serves both (Liu et al. 2025, arXiv 2502.16982, equation 4). Muon steps groups with `muon`, torch's
    AdamW the others; the two share this object's groups and state.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        muon = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        adamw = {"betas": betas, "eps": eps, "fused": True}
        groups = [group | (muon if group["muon"] else adamw) for group in groups]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._share()

    def _share(self) -> None:
        """Makes the two optimizers, which share this object's groups and state."""
        matrices = [group for group in self.param_groups if group["muon"]]
        others = [group for group in self.param_groups if not group["muon"]]
        self.parts = [make(groups) for make, groups in ((_Matrices, matrices), (optim.AdamW, others)) if groups]
        for part in self.parts:
            part.state = self.state
        self._steps = [unmarked(part) for part in self.parts]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes none
        for step in self._steps:
            step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # a copy of the object or a state dict: other groups and another state
        self._share()
