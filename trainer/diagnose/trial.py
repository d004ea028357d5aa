"""Continues a fit for a few steps without its reports and checkpoints, to look at it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

from torch import nn
from torch.profiler import record_function

from trainer.checkpoint.store import CheckpointStore, load
from trainer.config import RollbackConfig, TrainConfig
from trainer.data.loader import to_device
from trainer.diagnose import flow, landscape
from trainer.diagnose.finding import Finding, unmeasured
from trainer.diagnose.profile import Cost, profiled
from trainer.diagnose.range_test import RangeTest, range_test
from trainer.errors import CheckpointError, ConfigError
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

WINDOWS = 2  # whose loss makes the landscape
WAITING = 0.1  # share of the time in waiting for data that is too much
DATA = "data loading"


@contextmanager
def fresh(task: Task, config: TrainConfig) -> Iterator[Fit]:
    """A fit of `task` in this process, before its first step. A loss that jumps is looked at, not rolled back."""
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
    """Windows trained on one after another, from the fit's epoch on, at a learning rate of one's own."""

    def __init__(self, fit: Fit, steps: int) -> None:
        self.fit, self.waited, self.since = fit, 0.0, time.perf_counter()
        self.taken = 0
        fit.total = fit.stepper.total = max(fit.total, fit.state.step + steps)  # what a loss does by progress ends at 1
        self.windows = chain.from_iterable(fit.loader.epoch(epoch, 0) for epoch in count(fit.state.epoch))
        fit.state.model.train()

    def take(self, lr: float) -> list[Any]:
        """Train on the next window; its micro-batches."""
        start = time.perf_counter()
        with record_function("wait for data"):
            window = next(self.windows)
        self.waited += time.perf_counter() - start
        self.fit.stepper.take(window, lr)
        self.fit.state.step += 1
        self.taken += 1
        if self.taken == 1:  # which has waited for the loader to start
            self.waited, self.since = 0.0, time.perf_counter()
        return window

    def loading(self) -> Finding:
        """Of all windows but the first."""
        if self.taken < 2:
            return unmeasured(DATA, "the first step waits for the loader to start: take two or more")
        return loading(self.waited / (time.perf_counter() - self.since), self.fit.config)


def find_lr(task: Task, config: TrainConfig, low: float = 1e-7, high: float = 10.0, steps: int = 100) -> RangeTest:
    """The range test on the task's own windows, by the optimizer and all else that `config` names but its schedule.

    Rates are those of train.optim.lr: a step is taken at what train.schedule.scale_lr makes of it for the batch size,
    times the task's own share, such as that of a phase.
    """
    with fresh(task, config) as fit:
        meter, taken = fit.state.meter, Steps(fit, steps)

        def train(lr: float) -> float:
            meter.new_epoch()
            own = task.lr_scale(fit.state.step / fit.total)
            taken.take(scaled_lr(config.schedule, lr, config.batch_size) * own)
            fit.stepper.drain()
            return meter.metrics()["train/loss"]

        return range_test(train, low, high, steps)


@dataclass
class Examined:
    """What was seen of a model: `findings`, and what they were made of. `step` and `epoch` are where it stood."""

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
    """Look at the landscape around the model of `checkpoint`, then train `steps` windows from there on, or from the
    start where there is none, at the learning rate that the schedule scales; then `profile_steps` more, for `trace`.

    Of a landscape of `points` by `points`, 0 for none. Raises CheckpointError where the checkpoint, which is called
    what is `shown`, cannot be read.
    """
    with fresh(task, config) as fit:
        try:
            around, untrained = _around(fit, checkpoint or config.resume_from, shown, points)
        except CheckpointError as error:
            if checkpoint is not None:
                raise
            raise ConfigError(f"train.resume_from: {error}") from error
        step, epoch = fit.state.step, fit.state.epoch
        taken = Steps(fit, steps + profile_steps)
        lr = scaled_lr(config.schedule, optim.learning_rate(config.optim), config.batch_size)
        lr *= fit.state.plateau.scale
        windows: list[list[Any]] = []
        layers = flow.gradient_flow(fit.state.model, lambda: windows.append(taken.take(lr)), steps)
        data = taken.loading()
        fit.stepper.drain()
        found = flow.findings(layers)
        if bad := fit.state.meter.sums.get("skipped_steps", 0):
            found[0] = _nonfinite(fit, windows, int(bad), steps)
            found[1] = unmeasured(flow.CHECKS[1], "steps that are not finite change nothing")
        if around is None:
            found.append(unmeasured(landscape.CHECK, "it was left out, or nothing has been trained yet"))
        else:
            found.append(landscape.finding(around, untrained))
        found.append(data)
        costs = profiled(lambda: taken.take(lr), profile_steps, trace) if trace else []
        return Examined(step, epoch, lr, layers, found, around, costs)


def _around(fit: Fit, checkpoint: Path | None, shown: str, points: int) -> tuple[landscape.Landscape | None, float]:
    """Load the checkpoint; the loss around it, and what it was before training."""
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


def _nonfinite(fit: Fit, windows: list[list[Any]], bad: int, steps: int) -> Finding:
    culprit = first_nonfinite(fit.state.model, lambda: fit.stepper.passes(windows[-1]))
    advice = f"{culprit}: look at the data, lower train.optim.lr, or set train.clip.norm."
    return Finding(
        flow.CHECKS[0], "not finite", f"{bad} of {steps} steps had a loss or gradient that is not finite", bad, advice
    )


def loading(share: float, config: TrainConfig) -> Finding:
    """Of the share of the time in waiting for the loader."""
    figure = f"{share:.1%} of the time goes into waiting for data (too much over {WAITING:.0%})"
    if share <= WAITING:
        return Finding(DATA, "healthy", figure, share)
    advice = f"train.num_workers is {config.num_workers}: auto measures how many loader processes are quickest."
    if config.num_workers == "auto":
        advice = (
            "make a sample cheaper to read: a cache (trainer.data.cache) or a quicker format, see docs/guide/data.md."
        )
    return Finding(DATA, "slow", figure, share, advice)
