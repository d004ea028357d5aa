"""Averages of the weights that training passes through.

    ema   a <- d a + (1 - d) w, with d = min(decay, (1 + n)/(10 + n)) after n updates, so that the first weights are
          soon forgotten (Polyak & Juditsky 1992; the warm-up is TensorFlow's ExponentialMovingAverage)
    swa   the mean of the weights after `start` (Izmailov et al. 2018, arXiv 1803.05407)

Batch norm's statistics are averaged in the same way, in place of another pass over the data.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from trainer.config import AverageConfig


class Average:
    """The average that `config` asks for of `model`'s weights; `total` steps make the whole training."""

    def __init__(self, config: AverageConfig, model: nn.Module, total: int) -> None:
        self.config = config
        self.start = round(config.start * total) if config.name == "swa" else 0
        self._model = model
        self._averaged: AveragedModel | None = None
        if config.name != "none":
            self._averaged = AveragedModel(model, multi_avg_fn=self._take_in, use_buffers=True)

    def update(self, step: int) -> None:
        """Take in the weights after `step` optimizer steps."""
        if self._averaged is not None and step > self.start and step % self.config.every_steps == 0:
            self._averaged.update_parameters(self._model)

    @torch.no_grad()
    def _take_in(self, averages: Sequence[Tensor], weights: Sequence[Tensor], updates: Any) -> None:
        """Blend in place; all of one call have one type. How many updates there were is read on the host: a GPU's
        `updates` would be waited for."""
        assert self._averaged is not None
        n = int(self._averaged.n_averaged)
        share = 1 / (n + 1) if self.config.name == "swa" else 1 - min(self.config.decay, (1 + n) / (10 + n))
        if averages[0].is_floating_point():
            torch._foreach_lerp_([*averages], [*weights], share)
        else:
            torch._foreach_copy_([*averages], [*weights])

    @property
    def model(self) -> nn.Module:
        """What is to be evaluated: the average, once there is one."""
        started = self._averaged is not None and int(self._averaged.n_averaged) > 0
        return self._averaged.module if self._averaged is not None and started else self._model

    def state(self) -> dict[str, Any] | None:
        """As `TrainState.state_dict` has it; before the first update there is nothing to keep."""
        if self._averaged is None:
            return None
        updates = int(self._averaged.n_averaged)
        return {"updates": updates, "model": self._averaged.module.state_dict(keep_vars=True) if updates else {}}

    def load(self, state: dict[str, Any] | None) -> None:
        """Become what `state` gave; without one, an average starts where training goes on."""
        if self._averaged is not None and state is not None:
            self._averaged.n_averaged.fill_(state["updates"])
            if state["updates"]:
                self._averaged.module.load_state_dict(state["model"])
