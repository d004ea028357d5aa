"""Averages the weights over training.

    ema   a <- d a + (1 - d) w, with d = min(decay, (1 + n)/(10 + n)) after n updates, so that the first weights are
          soon forgotten (Polyak & Juditsky 1992; the warm-up is TensorFlow's ExponentialMovingAverage)
    swa   the mean of the weights after `start` (Izmailov et al. 2018, arXiv 1803.05407)

Batch norm's statistics are averaged in the same way, instead of by another pass over the data. Frozen tensors are
neither averaged nor copied.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from trainer.compat import foreach
from trainer.config import AverageConfig
from trainer.errors import ConfigError
from trainer.runtime.model_state import Saved


class Average:
    """The average of `model`'s weights under `config`; the whole training has `total` steps."""

    def __init__(self, config: AverageConfig, model: nn.Module, total: int) -> None:
        self.config = config
        self.start = round(config.start * total) if config.name == "swa" else 0
        self._model, self._begun = model, False
        self._updates: int | Tensor = 0  # a tensor if only the device knows
        self._averaged: nn.Module | None = None
        if config.name != "none":
            self._follow(f"train.average.name={config.name}")

    def _follow(self, setting: str) -> None:
        """Makes the second model, which `setting` asks for."""
        self._averaged = _copy(self._model, setting)
        self._saved = Saved(self._averaged)
        now = list(zip(_moving(self._averaged), _moving(self._model), strict=True))
        # An infinity, as in a mask, minus itself is NaN; integers have no mean.
        self._blended = [(a, w) for a, w in now if _has_mean(w) and bool(w.isfinite().all())]
        self._copied = [(a, w) for a, w in now if not any(w is other for _, other in self._blended)]

    def update(self, step: int, bad: Tensor | None = None) -> None:
        """Adds the weights after `step` optimizer steps to the average.

        `bad` is on the device: 1.0 if the last step was not taken, so that the weights are in the average already; else
        0.0. It does not wait for the device.
        """
        if self._averaged is None or step <= self.start or step % self.config.every_steps:
            return
        self._begun = True
        self._update() if bad is None else self._update_on_device(bad == 0)

    @torch.no_grad()
    def _update(self) -> None:
        n = int(self._updates)
        if self._blended:
            averages, weights = zip(*self._blended, strict=True)
            foreach.lerp_(averages, weights, self._share(n) if n else 1.0)
        for average, weight in self._copied:
            average.copy_(weight)
        self._updates = n + 1

    def _share(self, n: int) -> float:
        """Returns the weight of the newest weights in the average, after `n` updates."""
        return 1 / (n + 1) if self.config.name == "swa" else max(9 / (10 + n), 1 - self.config.decay)

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
        """Returns the model to evaluate: the average, once there is one."""
        if self._averaged is None or not self._begun:
            return self._model
        for average, module in zip(self._averaged.modules(), self._model.modules(), strict=True):
            if type(module).set_extra_state is not nn.Module.set_extra_state:  # extra state has no mean
                average.set_extra_state(deepcopy(module.get_extra_state()))
        return self._averaged

    def state(self) -> dict[str, Any] | None:
        """Returns the state for `TrainState.state_dict`; without weights before the first update."""
        if self._averaged is None:
            return None
        return {
            "updates": int(self._updates),
            "model": self._saved.state() if self._begun else {},
        }

    def load(self, state: dict[str, Any] | None) -> None:
        """Loads the result of `state`; without one, an average starts at the current weights."""
        if self._averaged is not None and state is not None:
            self._updates, self._begun = state["updates"], bool(state["model"])
            if self._begun:
                self._saved.load(state["model"])


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _copy(model: nn.Module, setting: str) -> nn.Module:
    """Returns a second model, which shares frozen parameters. Raises ConfigError if the model cannot be copied."""
    # Objects in deepcopy's memo are not copied. A tensor that a module computes from its parameters and keeps, as
    # weight_norm does, is made again in each pass; torch does not copy one that has a history.
    memo: dict[int, Any] = {id(p): p for p in model.parameters() if not p.requires_grad}
    for module in model.modules():
        computed = (value for value in vars(module).values() if isinstance(value, Tensor) and not value.is_leaf)
        memo |= {id(tensor): tensor.detach().clone() for tensor in computed}
    try:
        return deepcopy(model, memo)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"{setting} keeps a second model, and {type(model).__name__} cannot be copied ({error}): keep out of it "
            f"what copy.deepcopy refuses, or leave {setting} out."
        ) from error


def _moving(model: nn.Module) -> Iterator[Tensor]:
    """Yields the tensors that training or a forward pass changes."""
    yield from (p for p in model.parameters() if p.requires_grad)
    yield from model.buffers()
