"""Learning rates as functions of the step.

Step s is the number of optimizer steps already done (0 at the first update), T their total, W the length of the
warmup. The warmup multiplies by (s + 1)/(W + 1): the first update already moves, and at s = W the factor is 1, so that
every schedule is continuous where its warmup ends.

    constant    1
    cosine      from 1 to min_lr/lr at s = T (Loshchilov & Hutter 2017, arXiv 1608.03983, without restarts)
    one_cycle   cosine from 1/div up to 1 at s = W, cosine down to 1/(div * final_div) at s = T - 1 (Smith & Topin,
                arXiv 1708.07120; torch's OneCycleLR)
    plateau     1, times `factor` at each plateau of the monitored metric
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from trainer.config import PlateauConfig, ScheduleConfig
from trainer.monitor import improved


def warmup_length(config: ScheduleConfig, total: int, steps_per_epoch: int) -> float:
    """The warmup's length in steps, whichever way it was given; for one_cycle, that of its rise, by default torch's."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    if config.warmup_epochs is not None:
        return round(config.warmup_epochs * steps_per_epoch)
    if config.warmup_ratio is not None:
        return round(config.warmup_ratio * total)
    return max(config.one_cycle.pct_start * total - 1, 0.0) if config.name == "one_cycle" else 0


def schedule(config: ScheduleConfig, lr: float, total: int, steps_per_epoch: int) -> Callable[[float], float]:
    """The learning rate as a function of the step, continuous on [0, total]. For plateau, before its scaling.

    `lr` is the peak, `total` the number of optimizer steps of the run.
    """
    warmup = warmup_length(config, total, steps_per_epoch)
    if config.name == "one_cycle":
        low = lr / config.one_cycle.div_factor
        end = low / config.one_cycle.final_div_factor
        fall = max(total - 1 - warmup, 1)
        return lambda step: (
            _cosine(low, lr, step / warmup) if step < warmup else _cosine(lr, end, (step - warmup) / fall)
        )
    floor = min(config.min_lr, lr) if config.name == "cosine" else lr
    fall = max(total - warmup, 1)
    return lambda step: lr * (step + 1) / (warmup + 1) if step < warmup else _cosine(lr, floor, (step - warmup) / fall)


def _cosine(start: float, end: float, progress: float) -> float:
    """Half a cosine from `start` at progress 0 to `end` at 1, and flat after it."""
    return end + (start - end) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


class Plateau:
    """Scale the learning rate down when a metric stops improving: torch's ReduceLROnPlateau, relative threshold."""

    def __init__(self, config: PlateauConfig, lr: float) -> None:
        self.config = config
        self.floor = min(config.min_lr / lr, 1.0)
        self.scale = 1.0  # of the schedule's value
        self.best: float | None = None
        self.bad_epochs = 0

    def update(self, value: float) -> None:
        """Take in the metric of one epoch."""
        margin = 0.0 if self.best is None else abs(self.best) * self.config.threshold
        if improved(value, self.best, self.config.mode, margin):
            self.best, self.bad_epochs = value, 0
            return
        self.bad_epochs += 1
        if self.bad_epochs > self.config.patience:
            self.scale, self.bad_epochs = max(self.scale * self.config.factor, self.floor), 0

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "best": self.best, "bad_epochs": self.bad_epochs}

    def load(self, state: dict[str, Any]) -> None:
        self.scale, self.best, self.bad_epochs = state["scale"], state["best"], state["bad_epochs"]
