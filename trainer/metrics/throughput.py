"""Measures how fast a training run goes: the running epoch's times and rates."""

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
    """Times an epoch from where it was entered. Raises ConfigError where the device's peak is asked for and unknown."""

    def __init__(
        self, task: Task, config: TrainConfig, device: torch.device, loader: Loader, saver: Saver, meter: Meter
    ) -> None:
        self.loader, self.saver, self.meter, self.unit = loader, saver, meter, task.unit
        self.device = device
        self.full: float | None = None  # samples per second that would use the devices fully
        if config.peak_tflops is not None:
            from trainer.metrics.flops import full_rate  # torch's fake tensors, which few need

            self.full = full_rate(task, config, config.peak_tflops, device, loader)
        self.stopped: float | None = None
        self.enter(0)

    def enter(self, position: int) -> None:
        """The epoch is trained on from window `position` on."""
        self.position, self.start, self.stopped = position, time.perf_counter(), None
        self.counted, self.trained = self.meter.sums.get("count", 0.0), 0.0

    def stop(self) -> None:
        """Training ends here, and something else comes before `rates`."""
        self.stopped = time.perf_counter()

    def rates(self) -> dict[str, float]:
        """Per second of training; read before anything is evaluated."""
        seconds = self.trained = (self.stopped or time.perf_counter()) - self.start
        samples = self.loader.samples(self.position) / seconds
        rates = {"train/samples_per_sec": samples}
        if self.full is not None:
            rates["train/mfu"] = samples / self.full
        if self.unit != "samples":
            rates[f"train/{self.unit}_per_sec"] = (self.meter.sums.get("count", 0.0) - self.counted) / seconds
        return rates

    def times(self, everyone: Callable[[Any], list[Any]], metrics: Mapping[str, float]) -> dict[str, float]:
        """The whole epoch, evaluation and all; of it, the share spent waiting for data; and how long training stood
        still for saves since this was last asked. With several ranks, what each measures of itself, below
        `system/rank/<rank>/`: `everyone` gathers it, and this one's `metrics` say how it waited for the others."""
        seconds = time.perf_counter() - self.start
        stood, self.saver.seconds = self.saver.seconds, 0.0
        times = {
            "time/epoch_seconds": seconds,
            "time/data_share": self.loader.waited / seconds,
            "time/checkpoint_seconds": stood,
        }
        of_all = everyone(self._own({**times, **metrics}))
        ranks = enumerate(of_all) if len(of_all) > 1 else ()
        return times | {f"system/rank/{rank}/{name}": value for rank, own in ranks for name, value in own.items()}

    def _own(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The most memory that this process has had, MiB; the mean seconds of a step; the shares spent waiting."""
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        own = {
            "memory_mb": most / (2**20 if sys.platform == "darwin" else 2**10),
            "step_seconds": self.trained / max(self.loader.sampler.windows - self.position, 1),
        }
        if self.device.type == "cuda":
            own["gpu_memory_mb"] = torch.cuda.max_memory_allocated(self.device) / 2**20
        shares = ("data_share", "communication_share")
        return own | {name: metrics[f"time/{name}"] for name in shares if f"time/{name}" in metrics}
