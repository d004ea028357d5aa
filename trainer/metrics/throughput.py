"""Measures the speed of a training run: the running epoch's times and rates."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainer.checkpoint.saver import Saver
from trainer.config import TrainConfig
from trainer.data import Loader
from trainer.metrics.meter import Meter
from trainer.task import Task


class Pace:
    """Times an epoch from the window at which it was entered. Raises ConfigError for an unknown peak."""

    def __init__(
        self, task: Task, config: TrainConfig, device: torch.device, loader: Loader, saver: Saver, meter: Meter
    ) -> None:
        self.loader, self.saver, self.meter, self.unit = loader, saver, meter, task.unit
        self.device = device
        self.full: float | None = None  # samples per second that would use the devices fully
        if config.peak_tflops is not None:
            from trainer.metrics.flops import full_rate  # imports torch's fake tensors, which few runs need

            self.full = full_rate(task, config, config.peak_tflops, device, loader)
        self.stopped: float | None = None
        self.enter(0)

    def enter(self, position: int) -> None:
        """Starts the clock of an epoch that trains from window `position` on."""
        self.position, self.start, self.stopped = position, time.perf_counter(), None
        self.counted, self.trained = self.meter.sums.get("count", 0.0), 0.0

    def stop(self) -> None:
        """Stops the clock of training, if other work follows before `rates` is called."""
        self.stopped = time.perf_counter()

    def rates(self) -> dict[str, float]:
        """Returns the rates per second of training; called before anything is evaluated."""
        seconds = self.trained = (self.stopped or time.perf_counter()) - self.start
        samples = self.loader.samples(self.position) / seconds
        rates = {"train/samples_per_sec": samples}
        if self.full is not None:
            rates["train/mfu"] = samples / self.full
        if self.unit != "samples":
            rates[f"train/{self.unit}_per_sec"] = (self.meter.sums.get("count", 0.0) - self.counted) / seconds
        return rates

    def times(self, everyone: Callable[[Any], list[Any]], metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns the time of the whole epoch with its evaluation, the share of it spent waiting for data, and the
        seconds for which saves have stopped training since the last call.

        With several ranks, `everyone` gathers each rank's measures below `system/rank/<rank>/`; this rank's `metrics`
        have its own shares of waiting time.
        """
        seconds = time.perf_counter() - self.start
        stood, self.saver.seconds = self.saver.seconds, 0.0
        times = {
            "time/epoch_seconds": seconds,
            "time/data_share": self.loader.waited / seconds,
            "time/checkpoint_seconds": stood,
        }
        gathered = everyone(self._of_this_rank({**times, **metrics}))
        ranks = enumerate(gathered) if len(gathered) > 1 else ()
        return times | {f"system/rank/{rank}/{name}": value for rank, part in ranks for name, value in part.items()}

    def _of_this_rank(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns this process's peak memory in MiB, the mean seconds of a step, and the shares spent waiting."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        measures = {
            "memory_mb": peak / (2**20 if sys.platform == "darwin" else 2**10),
            "step_seconds": self.trained / max(self.loader.sampler.windows - self.position, 1),
        }
        if self.device.type == "cuda":
            measures["gpu_memory_mb"] = torch.cuda.max_memory_allocated(self.device) / 2**20
        shares = ("data_share", "communication_share")
        return measures | {name: metrics[f"time/{name}"] for name in shares if f"time/{name}" in metrics}
