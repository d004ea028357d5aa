"""Holds what one window's forward and backward passes leave behind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


@dataclass(slots=True)
class Window:
    """What one window's forward and backward passes left behind, besides the gradients: sums, not yet divided."""

    loss: float | Tensor
    count: float | Tensor
    terms: dict[str, Tensor]
    noise: tuple[Tensor, Tensor] | None = None  # estimates of |G|^2 and tr(Sigma), where they were asked for
    met: Tensor | None = None  # the norm that clipping by norm met, where another rule had changed the gradient
    answered: Tensor | None = None  # whether fp16's loss scale alone answers a gradient that is not finite

    def times(self, factor: float | Tensor) -> Window:
        """The same with its sums multiplied, and the trace, which is in the unit of the count."""
        terms = {name: term * factor for name, term in self.terms.items()}
        noise = self.noise and (self.noise[0], self.noise[1] * factor)
        return replace(self, loss=self.loss * factor, count=self.count * factor, terms=terms, noise=noise)

    def on(self, device: torch.device) -> Window:
        """The same with its numbers on `device`."""
        loss, count, terms = tree_map(partial(torch.as_tensor, device=device), (self.loss, self.count, self.terms))
        return replace(self, loss=loss, count=count, terms=terms)
