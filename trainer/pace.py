"""How fast a training run goes: the running epoch's times and rates."""

from __future__ import annotations

import time

from trainer.checkpoint.saver import Saver
from trainer.data import Loader
from trainer.meter import Meter


class Pace:
    """Times an epoch from where it was entered; `unit` is what a loss counts."""

    def __init__(self, loader: Loader, saver: Saver, meter: Meter, unit: str) -> None:
        self.loader, self.saver, self.meter, self.unit = loader, saver, meter, unit
        self.enter(0)

    def enter(self, position: int) -> None:
        """The epoch is trained on from window `position` on."""
        self.position, self.start = position, time.perf_counter()
        self.counted = self.meter.sums.get("count", 0.0)

    def rates(self) -> dict[str, float]:
        """Per second of training; read before anything is evaluated."""
        seconds = time.perf_counter() - self.start
        rates = {"train/samples_per_sec": self.loader.samples(self.position) / seconds}
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
