"""Lookahead: slow weights that follow the fast ones (Zhang et al. 2019, arXiv 1907.08610, algorithm 1)."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compat import foreach
from trainer.config import OptimConfig


class Lookahead:
    """Applies every `k` steps of any optimizer: slow <- slow + alpha (fast - slow), fast <- slow.

    The optimizer's state is left unchanged. Between two such steps the model holds the fast weights, also when it is
    evaluated and saved. The slow weights and the number of steps are state.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], k: int, alpha: float) -> None:
        self.params, self.k, self.alpha = dict(params), k, alpha
        self._restart()

    def _restart(self) -> None:
        self.steps = 0
        self.slow: dict[str, Tensor] = {name: p.detach().clone() for name, p in self.params.items()}

    @torch.no_grad()
    def step(self) -> None:
        """Counts a step of the optimizer; every `k`-th moves the slow weights and copies them to the model."""
        self.steps += 1
        if self.steps % self.k == 0:
            slow, fast = list(self.slow.values()), list[Tensor](self.params.values())
            foreach.lerp_(slow, fast, self.alpha)
            foreach.copy_(fast, slow)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "slow": dict(self.slow)}

    @torch.no_grad()
    def load(self, state: dict[str, Any] | None) -> None:
        """Continues from `state`; None, from a run without Lookahead, begins at the model's current weights."""
        self._restart()
        if state is not None:
            self.steps = state["steps"]
            for name, slow in self.slow.items():
                slow.copy_(state["slow"][name])


def lookahead(config: OptimConfig, model: nn.Module) -> Lookahead | None:
    """Returns Lookahead over the trained parameters of `model`, or None if `config` does not set it."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return Lookahead(trainable, k, config.lookahead.alpha) if (k := config.lookahead_k) else None
