"""Watches a metric over the epochs and stops training when it no longer improves, or diverges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer.config import EarlyStoppingConfig
from trainer.errors import ConfigError
from trainer.runtime.compare import improved


def read(metrics: Mapping[str, float], name: str, path: str) -> float:
    """Returns the metric `name`, which the configuration names at `path`. Raises ConfigError if it is missing."""
    if name not in metrics:
        known = ", ".join(sorted(metrics))
        raise ConfigError(f"train.{path} is {name!r}, which this task does not report: give one of {known}.")
    return metrics[name]


class EarlyStopping:
    """Counts the epochs since the monitored metric last improved; `diverged` is a sentence once it has diverged."""

    def __init__(self, config: EarlyStoppingConfig) -> None:
        self.config = config
        self.best: float | None = None
        self.bad_epochs = 0
        self.diverged = ""

    @property
    def stopped(self) -> bool:
        return self.bad_epochs >= self.config.patience or self.diverged != ""

    def update(self, value: float) -> None:
        """Records the metric of one epoch."""
        c = self.config
        if c.divergence is not None and (math.isnan(value) or improved(c.divergence, value, c.mode)):
            self.diverged = f"{c.monitor} came to {value:.4g}, beyond train.early_stopping.divergence={c.divergence:g}."
        if improved(value, self.best, c.mode, c.min_delta):
            self.best, self.bad_epochs = value, 0
        else:
            self.bad_epochs += 1

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "bad_epochs": self.bad_epochs, "diverged": self.diverged}

    def load(self, state: dict[str, Any]) -> None:
        self.best, self.bad_epochs = state["best"], state["bad_epochs"]
        self.diverged = state.get("diverged", "")
