"""Lookahead: slow weights that follow the fast ones (Zhang et al. 2019, arXiv 1907.08610, algorithm 1)."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import OptimConfig


class Lookahead:
    """Every `k` steps of any optimizer: slow <- slow + alpha (fast - slow), fast <- slow.

    The optimizer's own state goes on as it is. Between two such steps the model holds the fast weights, also where it
    is evaluated and saved. The slow ones are state, with the number of steps taken.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], k: int, alpha: float) -> None:
        self.params, self.k, self.alpha = dict(params), k, alpha
        self._restart()

    def _restart(self) -> None:
        self.steps = 0
        self.slow: dict[str, Tensor] = {name: p.detach().clone() for name, p in self.params.items()}

    @torch.no_grad()
    def step(self) -> None:
        """After each step of the optimizer."""
        self.steps += 1
        if self.steps % self.k == 0:
            slow, fast = list(self.slow.values()), list[Tensor](self.params.values())
            torch._foreach_lerp_(slow, fast, self.alpha)
            torch._foreach_copy_(fast, slow)

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "slow": dict(self.slow)}

    @torch.no_grad()
    def load(self, state: dict[str, Any] | None) -> None:
        """Go on from `state`; None, from a run without Lookahead: begin at the model's weights, as they are now."""
        self._restart()
        if state is not None:
            self.steps = state["steps"]
            for name, slow in self.slow.items():
                slow.copy_(state["slow"][name])


def lookahead(config: OptimConfig, model: nn.Module) -> Lookahead | None:
    """Lookahead around the optimizer of `config`, of the parameters that are trained; None where it has none."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return Lookahead(trained, k, config.lookahead.alpha) if (k := config.lookahead_k) else None
