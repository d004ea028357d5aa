"""Continues a fit for a few steps without its reports and checkpoints, to examine it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from trainer.checkpoint.store import CheckpointStore, load
from trainer.config import RollbackConfig, TrainConfig
from trainer.data.loader import to_device
from trainer.diagnose import flow, landscape
from trainer.diagnose.profile import Cost, profiled
from trainer.diagnose.range_test import RangeTest, range_test
from trainer.errors import CheckpointError, ConfigError
from trainer.finding import Finding, unmeasured
from trainer.gradients.find_nonfinite import first_nonfinite
from trainer.loop import Fit
from trainer.model.precision import autocast
from trainer.optim import build as optim
from trainer.optim.schedule import scaled_lr
from trainer.ranks import Solo
from trainer.report import Silent
from trainer.runtime.seeding import derive, seed_all
from trainer.settings import runtime
from trainer.task import Loss, Task

WINDOWS = 2  # whose loss is taken for the landscape
WAITING = 0.1  # share of the time spent waiting for data that is too much
DATA = "data loading"


@contextmanager
def fresh(task: Task, config: TrainConfig) -> Iterator[Fit]:
    """Yields a fit of `task` in this process, before its first step. A loss that jumps is not rolled back."""
    if config.parallel.ranks > 1:
        raise ConfigError("a diagnosis runs in one process: leave train.parallel out.")
    config = config.model_copy(update={"rollback": RollbackConfig()})
    with runtime(config) as device, tempfile.TemporaryDirectory() as directory:
        fit = Fit(task, config, Silent(), CheckpointStore(Path(directory), fence=1), device, Solo())
        try:
            yield fit
        finally:
            fit.loader.close()


class Steps:
    """Trains on one window after another, from the fit's epoch on, at chosen learning rates."""

    def __init__(self, fit: Fit, steps: int) -> None:
        self.fit, self.waited, self.since = fit, 0.0, time.perf_counter()
        self.taken = 0
        fit.total = fit.stepper.total = max(fit.total, fit.state.step + steps)  # progress must not exceed 1
        self.windows = chain.from_iterable(fit.loader.epoch(epoch, 0) for epoch in count(fit.state.epoch))
        fit.state.model.train()

    def take(self, lr: float) -> list[Any]:
        """Trains on the next window; returns its micro-batches."""
        start = time.perf_counter()
        with record_function("wait for data"):
            window = next(self.windows)
        self.waited += time.perf_counter() - start
        self.fit.stepper.take(window, lr)
        self.fit.state.step += 1
        self.taken += 1
        if self.taken == 1:  # it has waited for the loader to start
            self.waited, self.since = 0.0, time.perf_counter()
        return window

    def loading(self) -> Finding:
        """Returns the finding on data loading over all windows but the first."""
        if self.taken < 2:
            return unmeasured(DATA, "the first step waits for the loader to start: take two or more")
        return loading(self.waited / (time.perf_counter() - self.since), self.fit.config)


def find_lr(task: Task, config: TrainConfig, low: float = 1e-7, high: float = 10.0, steps: int = 100) -> RangeTest:
    """Runs the range test on the task's own windows, with all settings of `config` other than its schedule.

    Rates are values of train.optim.lr: a step is taken at the rate that train.schedule.scale_lr makes of it for the
    batch size, times the task's own factor, such as that of a phase.
    """
    with fresh(task, config) as fit:
        meter, taken = fit.state.meter, Steps(fit, steps)

        def train(lr: float) -> float:
            meter.new_epoch()
            factor = task.lr_scale(fit.state.step / fit.total)
            taken.take(scaled_lr(config.schedule, lr, config.batch_size) * factor)
            fit.stepper.drain()
            return meter.metrics()["train/loss"]

        return range_test(train, low, high, steps)


@dataclass
class Examined:
    """The `findings` on a model and the measurements for them, at its `step` and `epoch`."""

    step: int
    epoch: int
    lr: float
    layers: list[flow.Layer]
    findings: list[Finding]
    landscape: landscape.Landscape | None = None
    costs: list[Cost] = field(default_factory=list)


def examine(
    task: Task,
    config: TrainConfig,
    checkpoint: Path | None = None,
    *,
    shown: str = "",
    steps: int = 20,
    points: int = 13,
    trace: Path | None = None,
    profile_steps: int = 5,
) -> Examined:
    """Examines the model of `checkpoint`: the landscape around it, then `steps` windows of training from there.

    Without a checkpoint it trains from the start. The learning rate is the one that the schedule scales. With `trace`,
    `profile_steps` more are profiled. The landscape has `points` by `points`; 0 for none. Raises CheckpointError,
    naming the checkpoint `shown`, if it cannot be read.
    """
    with fresh(task, config) as fit:
        try:
            around, untrained = _around(fit, checkpoint or config.resume_from, shown, points)
        except CheckpointError as error:
            if checkpoint is not None:
                raise
            raise ConfigError(f"train.resume_from: {error}") from error
        step, epoch = fit.state.step, fit.state.epoch
        own_checks = _of_task(fit)
        taken = Steps(fit, steps + profile_steps)
        lr = scaled_lr(config.schedule, optim.learning_rate(config.optim), config.batch_size)
        lr *= fit.state.plateau.scale
        windows: list[list[Any]] = []
        layers = flow.gradient_flow(fit.state.model, lambda: windows.append(taken.take(lr)), steps)
        data = taken.loading()
        fit.stepper.drain()
        findings = flow.findings(layers)
        if bad := fit.state.meter.sums.get("skipped_steps", 0):
            findings[0] = _nonfinite(fit, windows, int(bad), steps)
            findings[1] = unmeasured(flow.CHECKS[1], "steps that are not finite change nothing")
        if around is None:
            findings.append(unmeasured(landscape.CHECK, "it was left out, or nothing has been trained yet"))
        else:
            findings.append(landscape.finding(around, untrained))
        findings += [data, *own_checks]
        costs = profiled(lambda: taken.take(lr), profile_steps, trace) if trace else []
        return Examined(step, epoch, lr, layers, findings, around, costs)


def _around(fit: Fit, checkpoint: Path | None, shown: str, points: int) -> tuple[landscape.Landscape | None, float]:
    """Loads the checkpoint; returns the landscape around it, and the loss before training."""
    if checkpoint is None:
        return None, 0.0
    windows = fit.loader.epoch(0, 0)
    batches = [batch for _, window in zip(range(WINDOWS), windows, strict=False) for batch in window]

    def loss_of(model: nn.Module, batch: Any) -> Loss:
        seed_all(derive(fit.config.seed, "evaluate", fit.state.step))
        with autocast(fit.config.precision, fit.device):
            return fit.task.loss(model, to_device(batch, fit.device))

    model = fit.state.model
    untrained = landscape.mean_loss(model.eval(), loss_of, batches) if points else 0.0
    fit.state.load_state_dict(load(checkpoint, shown=shown))
    if not points:
        return None, 0.0
    seed = fit.config.seed
    return landscape.landscape(model, loss_of, batches, dims=2, points=points, seed=seed), untrained


def _of_task(fit: Fit) -> list[Finding]:
    """Returns the findings of the task's own checks on the model."""
    seed_all(derive(fit.config.seed, "evaluate", fit.state.step))
    with torch.no_grad(), autocast(fit.config.precision, fit.device):
        return [*fit.task.findings(fit.state.model.eval())]


def _nonfinite(fit: Fit, windows: list[list[Any]], bad: int, steps: int) -> Finding:
    culprit = first_nonfinite(fit.state.model, lambda: fit.stepper.passes(windows[-1]))
    advice = f"{culprit}: look at the data, lower train.optim.lr, or set train.clip.norm."
    return Finding(
        flow.CHECKS[0], "not finite", f"{bad} of {steps} steps had a loss or gradient that is not finite", bad, advice
    )


def loading(share: float, config: TrainConfig) -> Finding:
    """Returns the finding on the share of the time that is spent waiting for the loader."""
    figure = f"{share:.1%} of the time goes into waiting for data (too much over {WAITING:.0%})"
    if share <= WAITING:
        return Finding(DATA, "healthy", figure, share)
    advice = f"train.num_workers is {config.num_workers}: auto measures how many loader processes are quickest."
    if config.num_workers == "auto":
        advice = (
            "make a sample cheaper to read: a cache (trainer.data.cache) or a quicker format, see docs/guide/data.md."
        )
    return Finding(DATA, "slow", figure, share, advice)
