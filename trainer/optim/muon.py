"""Muon for the hidden matrices and AdamW for all else, as one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import optim


class Muon(optim.Optimizer):
    """Jordan et al. 2024 (kellerjordan.github.io/posts/muon): momentum, orthogonalised by Newton-Schulz iterations.

    A matrix's update is scaled by 0.2 sqrt(max(rows, columns)), so that its RMS is that of AdamW's and one learning
    rate serves both (Liu et al. 2025, arXiv 2502.16982, equation 4). Groups with `muon` are torch's Muon's, the others
    AdamW's; the two share this object's groups and state.
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
        muon = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": "match_rms_adamw"}
        adamw = {"betas": betas, "eps": eps, "fused": True}
        groups = [group | (muon if group["muon"] else adamw) for group in groups]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._share()

    def _share(self) -> None:
        """Make the two that do the work, over this object's groups and state."""
        matrices = [group for group in self.param_groups if group["muon"]]
        others = [group for group in self.param_groups if not group["muon"]]
        self.parts = [make(groups) for make, groups in ((optim.Muon, matrices), (optim.AdamW, others)) if groups]
        for part in self.parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for part in self.parts:
            part.step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # a copy of the object or a state dict: other groups and another state
        self._share()
