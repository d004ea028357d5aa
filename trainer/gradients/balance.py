"""Weighs the parts of a loss so that all learn at one pace: `train.gradients.balance`."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.compat import foreach
from trainer.config import GradientConfig
from trainer.errors import ConfigError


class Balance:
    """GradNorm (Chen et al. 2018, arXiv 1711.02257, algorithm 1), whose weights follow the slope of eq. 2:

    w_i <- w_i - lr n_i sign(w_i n_i - G r_i^alpha), brought to a mean of 1, where n_i is the norm of the gradient of
    part i by the compared parameters, G the mean of w_i n_i, and r_i the part's mean over its first one, relative to
    the other parts' (eq. 1). No weight falls below 0.

    `observe` computes the next weights from a window's gradients, and `step` takes them over with the optimizer's step.
    A part has the weight 1 until its first step. Weights and first means are state.
    """

    def __init__(self, config: GradientConfig, named: Mapping[str, nn.Parameter]) -> None:
        self.config = config
        patterns = config.balance_of or ("*",)
        self.compared = [i for i, name in enumerate(named) if any(fnmatchcase(name, each) for each in patterns)]
        if not self.compared:
            some = ", ".join(list(named)[:5])
            raise ConfigError(
                f"train.gradients.balance_of={list(patterns)} matches no trained parameter; this model's are such as "
                f"{some}: give a pattern that matches."
            )
        self.load(None)

    def state(self) -> dict[str, Any]:
        return {"weights": dict(self.weights), "first": dict(self.first)}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Continues from `state`; None, from a run without balance, begins with equal weights."""
        state = state or {"weights": {}, "first": {}}
        self.weights: dict[str, float] = dict(state["weights"])
        self.first: dict[str, float] = dict(state["first"])
        self._next = dict(self.weights), dict(self.first)

    def of(self, name: str) -> float:
        """Returns the weight of a part."""
        return self.weights.get(name, 1.0)

    @torch.no_grad()
    def observe(
        self, gradients: Mapping[str, Sequence[Tensor | None]], sums: Mapping[str, Tensor], count: float | Tensor
    ) -> None:
        """Computes the next weights from the gradients and the sums of a window's parts, which have this count.

        A window with a number that is not finite changes none.
        """
        norms = [_norm([gradient[i] for i in self.compared]) for gradient in gradients.values()]
        numbers = [*norms, *(total.double().cpu() for total in sums.values())]
        divided = (torch.stack(numbers) / float(count) if float(count) and norms else torch.zeros(0)).tolist()
        if divided and all(map(math.isfinite, divided)):
            slopes = dict(zip(gradients, divided[: len(norms)], strict=True))
            means = dict(zip(sums, divided[len(norms) :], strict=True))
            self._next = self._weights(slopes, means), self._first(means)

    def step(self) -> None:
        """Takes over the weights that the last window gave."""
        self.weights, self.first = self._next

    def _first(self, means: Mapping[str, float]) -> dict[str, float]:
        first = {**means, **self.first}
        if (name := next((name for name in means if first[name] <= 0), None)) is not None:
            raise ConfigError(
                f"train.gradients.balance=gradnorm compares each part of the loss with its first value, and {name!r} "
                f"began at {first[name]:g}: leave it out, or make every part a loss above 0."
            )
        return first

    def _weights(self, slopes: Mapping[str, float], means: Mapping[str, float]) -> dict[str, float]:
        first = self._first(means)
        ratios = {name: max(mean / first[name], 0.0) for name, mean in means.items()}
        typical = sum(ratios.values()) / len(ratios)
        steepness = sum(self.of(name) * slope for name, slope in slopes.items()) / len(slopes)
        weights: dict[str, float] = {}
        for name, slope in slopes.items():
            pace = ratios[name] / typical if typical else 1.0
            excess = self.of(name) * slope - steepness * pace**self.config.balance_alpha
            sign = (excess > 0) - (excess < 0)
            weights[name] = max(self.of(name) - self.config.balance_lr * slope * sign, 0.0)
        total = sum(weights.values())
        scaled = {name: weight * len(weights) / total if total else 1.0 for name, weight in weights.items()}
        return {**self.weights, **scaled}


def balance_of(config: GradientConfig, model: nn.Module, optimizer: Optimizer) -> Balance | None:
    """Returns the balance of the parts of a loss of `model`; None if `config` sets none."""
    if config.balance == "none":
        return None
    names = {p: name for name, p in model.named_parameters()}
    return Balance(config, {names[p]: p for group in optimizer.param_groups for p in group["params"]})


def _norm(gradients: Sequence[Tensor | None]) -> Tensor:
    """Returns the norm of the gradients together, on the host; None counts as zeros."""
    norms = foreach.norm([gradient for gradient in gradients if gradient is not None] or [torch.zeros(1)])
    return torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms])).cpu()
