"""Schedule-free AdamW: gradients at one point, evaluations at the average of another."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.compat import foreach
from trainer.config import AverageConfig
from trainer.model.averaging import Average
from trainer.optim.base import Own


class ScheduleFree(Own):
    """Defazio et al. 2024, arXiv 2405.15682, algorithm 1, as the authors' package schedulefree 1.4 computes it:

    v <- beta2 v + (1 - beta2) g^2,  z <- z - lr (g / (sqrt(v') + eps) + wd y),  x <- (1 - c) x + c z,
    y <- (1 - beta1) z + beta1 x, with v' = v / (1 - beta2^t), w the square of the largest lr so far and c = w / sum w.

    The parameters are y, at which gradients are computed; z is state. `averaged` computes x, the point to evaluate.
    """

    share = 0.0  # c of the last step

    def update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        z, v, steps = self._iterates(params), self.buffers("exp_avg_sq", params), self.count(params)
        beta1, beta2 = group["betas"]
        foreach.mul_(v, beta2)
        foreach.addcmul_(v, grads, grads, 1 - beta2)
        root = foreach.sqrt(foreach.div(v, [1 - beta2**t for t in steps]))
        foreach.add_(root, group["eps"])
        u = foreach.div(grads, root)
        if group["weight_decay"]:
            foreach.add_(u, params, alpha=group["weight_decay"])
        foreach.mul_(u, group["lr"])
        foreach.sub_(z, u)
        shares = [self._weigh(p, group["lr"]) for p in params]
        self.share = min(shares)
        # With x = (y - (1 - beta1)(z + u)) / beta1 before the step: y <- y + c (z - y) - (1 - c)(1 - beta1) u.
        towards = foreach.sub(z, params)
        foreach.mul_(towards, shares)
        foreach.add_(params, towards)
        foreach.mul_(u, [(1 - c) * (1 - beta1) for c in shares])
        foreach.sub_(params, u)

    def _iterates(self, params: list[Tensor]) -> list[Tensor]:
        """Returns z of each parameter, which begins at the parameter."""
        for p in params:
            if "z" not in self.state[p]:
                self.state[p]["z"] = torch.clone(p, memory_format=torch.contiguous_format)
        return [self.state[p]["z"] for p in params]

    def _weigh(self, p: Tensor, lr: float) -> float:
        """Counts the weight of the newest z, and returns its share of the sum."""
        state = self.state[p]
        state["largest_lr"] = largest = max(state.get("largest_lr", 0.0), lr)
        state["weights"] = total = state.get("weights", 0.0) + largest**2
        return largest**2 / total if total else 0.0

    def averaged(self) -> dict[Tensor, Tensor]:
        """Returns x by parameter: (y - (1 - beta1) z) / beta1; parameters that have taken no step are left out."""
        return {
            p: torch.lerp(p.detach(), self.state[p]["z"], 1 - 1 / group["betas"][0])
            for group in self.param_groups
            for p in group["params"]
            if "z" in self.state[p]
        }


class EvaluationPoint(Average):
    """The model at x of `optimizer`, to evaluate and save in the place of an average of the weights.

    Batch norm's statistics are those of the passes at y, averaged with the weights that x gives to the steps.
    """

    def __init__(self, optimizer: ScheduleFree, model: nn.Module) -> None:
        super().__init__(AverageConfig(), model, total=0)
        self._optimizer = optimizer
        self._follow("train.optim.name=schedule_free")
        self._points = [(x, p) for x, p in (*self._blended, *self._copied) if isinstance(p, nn.Parameter)]
        self._blended = [(a, buffer) for a, buffer in self._blended if not isinstance(buffer, nn.Parameter)]
        self._copied = [(a, buffer) for a, buffer in self._copied if not isinstance(buffer, nn.Parameter)]

    def _share(self, n: int) -> float:
        return self._optimizer.share

    @property
    def model(self) -> nn.Module:
        self._move()
        return super().model

    def state(self) -> dict[str, Any] | None:
        self._move()
        return super().state()

    @torch.no_grad()
    def _move(self) -> None:
        """Moves the second model to x."""
        points = self._optimizer.averaged()
        for x, p in self._points:
            x.copy_(points.get(p, p))


def average_of(config: AverageConfig, model: nn.Module, optimizer: Optimizer, total: int) -> Average:
    """Returns the model to evaluate: at schedule-free's x, else at the average that `config` sets, if it sets one."""
    if isinstance(optimizer, ScheduleFree):
        return EvaluationPoint(optimizer, model)
    return Average(config, model, total)
