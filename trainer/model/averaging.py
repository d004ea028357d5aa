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
from trainer.errors import ConfigError
from trainer.runtime.saved import Saved


class Average:
    """The average that `config` asks for of `model`'s weights; `total` steps make the whole training."""

    def __init__(self, config: AverageConfig, model: nn.Module, total: int) -> None:
        self.config = config
        self.start = round(config.start * total) if config.name == "swa" else 0
        self._model, self._begun = model, False
        self._updates: int | Tensor = 0  # a tensor where the device alone knows
        self._averaged: nn.Module | None = None
        if config.name == "none":
            return
        self._averaged = _copy(model, config)
        self._saved = Saved(self._averaged)
        now = list(zip(_moving(self._averaged), _moving(model), strict=True))
        # An infinity, as a mask has, less itself is NaN; whole numbers have no mean.
        self._blended = [(a, w) for a, w in now if _has_mean(w) and bool(w.isfinite().all())]
        self._copied = [(a, w) for a, w in now if not any(w is one for _, one in self._blended)]

    def update(self, step: int, taken: Tensor | None = None) -> None:
        """Take in the weights after `step` optimizer steps. `taken` tells on the device if the last one was taken; if
        not, the weights are those that are in already. The device is not waited for."""
        if self._averaged is None or step <= self.start or step % self.config.every_steps:
            return
        self._begun = True
        self._update_on_device(taken) if taken is not None else self._update()

    @torch.no_grad()
    def _update(self) -> None:
        n = int(self._updates)
        share = 1 / (n + 1) if self.config.name == "swa" else max(9 / (10 + n), 1 - self.config.decay)
        if self._blended:
            averages, weights = zip(*self._blended, strict=True)
            torch._foreach_lerp_(averages, weights, share if n else 1.0)
        for average, weight in self._copied:
            average.copy_(weight)
        self._updates = n + 1

    @torch.no_grad()
    def _update_on_device(self, taken: Tensor) -> None:
        n = torch.as_tensor(self._updates, dtype=torch.float32, device=taken.device)
        share = 1 / (n + 1) if self.config.name == "swa" else (9 / (10 + n)).clamp(min=1 - self.config.decay)
        share = torch.where(n == 0, 1.0, share * taken)
        for average, weight in self._blended:
            average.lerp_(weight, share.to(average.dtype))
        for average, weight in self._copied:
            average.copy_(weight)
        self._updates = n + taken

    @property
    def model(self) -> nn.Module:
        """What is to be evaluated: the average, once there is one."""
        if self._averaged is None or not self._begun:
            return self._model
        for average, module in zip(self._averaged.modules(), self._model.modules(), strict=True):
            if type(module).set_extra_state is not nn.Module.set_extra_state:  # which has no mean
                average.set_extra_state(deepcopy(module.get_extra_state()))
        return self._averaged

    def state(self) -> dict[str, Any] | None:
        """As `TrainState.state_dict` has it; before the first update there is nothing to keep."""
        if self._averaged is None:
            return None
        return {
            "updates": int(self._updates),
            "model": self._saved.state() if self._begun else {},
        }

    def load(self, state: dict[str, Any] | None) -> None:
        """Become what `state` gave; without one, an average starts where training goes on."""
        if self._averaged is not None and state is not None:
            self._updates, self._begun = state["updates"], bool(state["model"])
            if self._begun:
                self._saved.load(state["model"])


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _copy(model: nn.Module, config: AverageConfig) -> nn.Module:
    """A second model, which shares what is frozen. Raises ConfigError where the model cannot be copied."""
    # What is in deepcopy's memo is not copied. A tensor that a module computes from its parameters and keeps, as
    # weight_norm does, is made again in each pass; torch copies none that has a history.
    memo: dict[int, Any] = {id(p): p for p in model.parameters() if not p.requires_grad}
    for module in model.modules():
        computed = (value for value in vars(module).values() if isinstance(value, Tensor) and not value.is_leaf)
        memo |= {id(tensor): tensor.detach().clone() for tensor in computed}
    try:
        return deepcopy(model, memo)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"train.average.name={config.name} keeps a second model, and {type(model).__name__} cannot be copied "
            f"({error}): keep out of it what copy.deepcopy refuses, or leave train.average out."
        ) from error


def _moving(model: nn.Module) -> Iterator[Tensor]:
    """What training changes, or a forward pass."""
    yield from (p for p in model.parameters() if p.requires_grad)
    yield from model.buffers()
