"""Averages of the weights that training passes through.

    ema   a <- d a + (1 - d) w, with d = min(decay, (1 + n)/(10 + n)) after n updates, so that the first weights are
          soon forgotten (Polyak & Juditsky 1992; the warm-up is TensorFlow's ExponentialMovingAverage)
    swa   the mean of the weights after `start` (Izmailov et al. 2018, arXiv 1803.05407)

Batch norm's statistics are averaged in the same way, in place of another pass over the data. What is frozen is not
averaged, nor held a second time.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import AverageConfig


class Average:
    """The average that `config` asks for of `model`'s weights; `total` steps make the whole training."""

    def __init__(self, config: AverageConfig, model: nn.Module, total: int) -> None:
        self.config = config
        self.start = round(config.start * total) if config.name == "swa" else 0
        self._model, self._updates = model, 0
        self._averaged: nn.Module | None = None
        if config.name == "none":
            return
        # What is in deepcopy's memo is not copied.
        self._averaged = deepcopy(model, {id(p): p for p in model.parameters() if not p.requires_grad})
        now = list(zip(_moving(self._averaged), _moving(model), strict=True))
        # An infinity, as a mask has, less itself is NaN; whole numbers have no mean.
        self._blended = [(a, w) for a, w in now if w.is_floating_point() and bool(w.isfinite().all())]
        self._copied = [(a, w) for a, w in now if not any(w is one for _, one in self._blended)]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after `step` optimizer steps."""
        if self._averaged is None or step <= self.start or step % self.config.every_steps:
            return
        n = self._updates
        share = 1 / (n + 1) if self.config.name == "swa" else 1 - min(self.config.decay, (1 + n) / (10 + n))
        if self._blended:
            averages, weights = zip(*self._blended, strict=True)
            torch._foreach_lerp_(averages, weights, share if n else 1.0)
        for average, weight in self._copied:
            average.copy_(weight)
        self._updates += 1

    @property
    def model(self) -> nn.Module:
        """What is to be evaluated: the average, once there is one."""
        return self._averaged if self._averaged is not None and self._updates else self._model

    def state(self) -> dict[str, Any] | None:
        """As `TrainState.state_dict` has it; before the first update there is nothing to keep."""
        if self._averaged is None:
            return None
        return {
            "updates": self._updates,
            "model": self._averaged.state_dict(keep_vars=True) if self._updates else {},
        }

    def load(self, state: dict[str, Any] | None) -> None:
        """Become what `state` gave; without one, an average starts where training goes on."""
        if self._averaged is not None and state is not None:
            self._updates = state["updates"]
            if self._updates:
                self._averaged.load_state_dict(state["model"])


def _moving(model: nn.Module) -> Iterator[Tensor]:
    """What training changes, or a forward pass."""
    yield from (p for p in model.parameters() if p.requires_grad)
    yield from model.buffers()
