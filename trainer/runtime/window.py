"""Holds the results of one window's forward and backward passes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from trainer.compat.pytree import tree_map


@dataclass(slots=True)
class Window:
    """The sums of one window's forward and backward passes, not yet divided; the gradients are elsewhere."""

    loss: float | Tensor
    count: float | Tensor
    terms: dict[str, Tensor]
    noise: tuple[Tensor, Tensor] | None = None  # estimates of |G|^2 and tr(Sigma), if they were configured
    norm_divisor: float = 1.0  # the divisor still to apply to the gradient's norm once it is read
    met: Tensor | None = None  # the norm before clipping by norm, if another rule had changed the gradient
    answered: Tensor | None = None  # True if fp16's loss scale alone resolves a gradient that is not finite

    def times(self, factor: float | Tensor) -> Window:
        """Returns the window with its sums multiplied, and the trace, which is in the unit of the count."""
        terms = {name: term * factor for name, term in self.terms.items()}
        noise = self.noise and (self.noise[0], self.noise[1] * factor)
        return replace(self, loss=self.loss * factor, count=self.count * factor, terms=terms, noise=noise)

    def on(self, device: torch.device) -> Window:
        """Returns the window with its numbers on `device`."""
        loss, count, terms = tree_map(partial(torch.as_tensor, device=device), (self.loss, self.count, self.terms))
        return replace(self, loss=loss, count=count, terms=terms)
