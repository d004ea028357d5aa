"""What a fit of a task would do next, without its reports and checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any

from trainer.checkpoint import CheckpointStore
from trainer.config import TrainConfig
from trainer.diagnose.range_test import RangeTest, range_test
from trainer.errors import ConfigError
from trainer.loop import Fit
from trainer.parallel import Solo
from trainer.report import CONTINUE, Verdict
from trainer.runtime import runtime
from trainer.task import Task


class Silent:
    """A reporter that nobody hears."""

    preempted = False

    def report(self, step: int, metrics: Mapping[str, float], **given: Any) -> Verdict:
        return CONTINUE

    def event(self, kind: str, **fields: Any) -> None:
        pass

    def artifact(self, path: Path, name: str | None = None) -> None:
        pass


@contextmanager
def fresh(task: Task, config: TrainConfig) -> Iterator[Fit]:
    """A fit of `task` in this process, before its first step."""
    if config.parallel.ranks > 1:
        raise ConfigError("a diagnosis runs in one process: leave train.parallel out.")
    with runtime(config) as device, tempfile.TemporaryDirectory() as directory:
        fit = Fit(task, config, Silent(), CheckpointStore(Path(directory), fence=1), device, Solo())
        try:
            yield fit
        finally:
            fit.loader.close()


def find_lr(task: Task, config: TrainConfig, low: float = 1e-7, high: float = 10.0, steps: int = 100) -> RangeTest:
    """The range test on the task's own windows, by the optimizer and all else that `config` names but its schedule."""
    with fresh(task, config) as fit:
        meter, fit.total = fit.state.meter, steps
        windows = chain.from_iterable(fit.loader.epoch(epoch, 0) for epoch in count())
        fit.state.model.train()

        def train(lr: float) -> float:
            meter.new_epoch()
            fit.stepper.take(next(windows), lr)
            fit.state.step += 1
            fit.stepper.drain()
            return meter.metrics()["train/loss"]

        return range_test(train, low, high, steps)
