"""Measures how fast a training run goes: the running epoch's times and rates."""

from __future__ import annotations

import time

import torch

from trainer.checkpoint.saver import Saver
from trainer.config import TrainConfig
from trainer.data import Loader
from trainer.metrics.meter import Meter
from trainer.task import Task


class Pace:
    """Times an epoch from where it was entered. Raises ConfigError where the device's peak is asked for and unknown."""

    def __init__(
        self, task: Task, config: TrainConfig, device: torch.device, loader: Loader, saver: Saver, meter: Meter
    ) -> None:
        self.loader, self.saver, self.meter, self.unit = loader, saver, meter, task.unit
        self.full: float | None = None  # samples per second that would use the devices fully
        if config.peak_tflops is not None:
            from trainer.metrics.flops import full_rate  # torch's fake tensors, which few need

            self.full = full_rate(task, config, config.peak_tflops, device, loader)
        self.stopped: float | None = None
        self.enter(0)

    def enter(self, position: int) -> None:
        """The epoch is trained on from window `position` on."""
        self.position, self.start, self.stopped = position, time.perf_counter(), None
        self.counted = self.meter.sums.get("count", 0.0)

    def stop(self) -> None:
        """Training ends here, and something else comes before `rates`."""
        self.stopped = time.perf_counter()

    def rates(self) -> dict[str, float]:
        """Per second of training; read before anything is evaluated."""
        seconds = (self.stopped or time.perf_counter()) - self.start
        samples = self.loader.samples(self.position) / seconds
        rates = {"train/samples_per_sec": samples}
        if self.full is not None:
            rates["train/mfu"] = samples / self.full
        if self.unit != "samples":
            rates[f"train/{self.unit}_per_sec"] = (self.meter.sums.get("count", 0.0) - self.counted) / seconds
        return rates

    def times(self) -> dict[str, float]:
        """The whole epoch, evaluation and all; of it, the share spent waiting for data; and how long training stood
        still for saves since this was last asked."""
        seconds = time.perf_counter() - self.start
        stood, self.saver.seconds = self.saver.seconds, 0.0
        return {
            "time/epoch_seconds": seconds,
            "time/data_share": self.loader.waited / seconds,
            "time/checkpoint_seconds": stood,
        }
