"""Implements sharpness-aware minimisation: the gradient at the worst point nearby."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compat import foreach
from trainer.config.optim import SamConfig


class Sam:
    """Wraps any optimizer in algorithm 1 of Foret et al. 2021, arXiv 2010.01412.

    The point is w + rho g/|g| over all parameters, or w + rho w^2 g/|w g| if `adaptive` (Kwon et al. 2021,
    arXiv 2102.11600, equation 8). `norm` gives |g| of the whole model, of which a rank may hold parts.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], config: SamConfig, norm: Callable[[Sequence[Tensor]], Tensor]
    ) -> None:
        self.params, self.config, self.norm = params, config, norm

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """Moves the weights to the worst point by the current gradients, and afterwards restores them to the bit.

        Gradients may be divided over the ranks or whole. One that is not finite makes the weights, and so the second
        gradient, not finite too: the guard, which checks only the second, sees both.
        """
        params: list[Tensor] = [p for p in self.params if p.grad is not None]
        before = [p.detach().clone() for p in params]
        with torch.no_grad():
            self._ascend(params)
        try:
            yield
        finally:
            with torch.no_grad():
                foreach.copy_(params, before)

    def _ascend(self, params: list[Tensor]) -> None:
        if not params:
            return
        towards: Any = [p.grad for p in params]
        if self.config.adaptive:
            towards = foreach.mul(params, towards)
        norm = self.norm(towards)
        if self.config.adaptive:
            towards = foreach.mul(params, towards)
        foreach.add_(params, foreach.mul(towards, self.config.rho / norm.clamp(min=1e-12)))
