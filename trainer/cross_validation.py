"""Trains a task several times inside one trial, each time from the beginning: once for each fold or for each seed.

Each fold reports under its own number, from 1. After each, the means over the folds so far are reported as the trial's,
with a fold in place of an epoch: so strategies that compare trials by epoch compare them by folds, and may stop or
pause one between two folds. The same holds for seeds, which do not divide the data: the first seed is the
configuration's own, so that it trains like the trial without other seeds.

Steps continue from fold to fold. The metrics of earlier folds are saved with every checkpoint, so a trial resumes in
the middle of any fold as exactly as one without folds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from trainer.checkpoint.saver import Saver
from trainer.checkpoint.store import CheckpointStore, Pinned
from trainer.config import CheckpointConfig, TrainConfig
from trainer.loop import Watch, fit
from trainer.report import ENDS, CheckpointRef, Outcome, Relay, Report, Reporter, Verdict
from trainer.runtime.compare import improved
from trainer.runtime.process_state import kept
from trainer.runtime.seeding import derive
from trainer.task import Task

ITEM = "folds"  # item of a saved state
_SET_LATER = ("number", "shared")  # attributes that a task's maker sets later
Metrics = dict[str, float]


def fit_folds(
    task: Task, config: TrainConfig, reporter: Reporter, checkpoints: CheckpointStore, watch: Watch | None = None
) -> Outcome:
    """Runs `fit` for each of `config.folds` folds of `task`, or under each of `config.seeds` seeds.

    A fold counts by its metrics in the best epoch by `checkpoint.monitor`, or the last epoch if that is None. Raises
    the errors of `fit`.
    """
    folds = _Folds(checkpoints, config.checkpoint)
    while True:
        at = folds.at
        with kept():  # a trial that resumes in its second fold has not trained its first in this process
            fold, settings = _part(task, config, len(at.before))
            outcome = fit(fold, settings, _Reporter(reporter, at), folds, watch)
        of_all_folds = replace(outcome, step=at.offset + outcome.step, epoch=len(at.before))
        if outcome.kind != "complete":
            return of_all_folds
        at = at.next(outcome.step)
        folds.begin(at)
        done = len(at.before)
        judged = _mean(at.before) if config.seeds == 1 else {**_spread(at.before), **_mean(at.before)}
        verdict = reporter.report(Report(at.offset, judged, epoch=done))
        if done == config.parts:
            return replace(of_all_folds, epoch=done)
        if verdict.kind in ENDS:
            return replace(of_all_folds, kind=ENDS[verdict.kind], epoch=done)


def _part(task: Task, config: TrainConfig, number: int) -> tuple[Task, TrainConfig]:
    """Returns the task and configuration of one fold, or of one seed, counted from 0."""
    if config.folds > 1:
        return task.in_fold(number, config.folds), config
    if number == 0:
        return task, config
    seeded = config.model_copy(update={"seed": derive(config.seed, "repeat", number)})
    seeded_task = type(task)(task.config.model_copy(update={"train": seeded}))
    vars(seeded_task).update({name: vars(task)[name] for name in _SET_LATER if name in vars(task)})
    return seeded_task, seeded


def _spread(seeds: Collection[Metrics]) -> Metrics:
    """Returns `NAME/std`, `NAME/low` and `NAME/high` of each metric that every seed has.

    These are the sample standard deviation, and the mean minus and plus its standard error; with one seed, whose spread
    is unknown, low and high are its value.
    """
    spread: Metrics = {}
    for key, mean in _mean(seeds).items():
        if key.startswith(("time/", "system/")) or key.endswith("per_sec"):
            continue
        error = 0.0
        if len(seeds) > 1:
            values = [metrics[key] for metrics in seeds]
            spread[f"{key}/std"] = stdev(values) if all(map(math.isfinite, values)) else math.nan
            error = spread[f"{key}/std"] / math.sqrt(len(seeds))
        spread |= {f"{key}/low": mean - error, f"{key}/high": mean + error}
    return spread


def _mean(folds: Collection[Metrics]) -> Metrics:
    """Returns the mean of each metric that every fold has."""
    shared = set.intersection(*(set(metrics) for metrics in folds))
    return {key: fmean(metrics[key] for metrics in folds) for key in next(iter(folds)) if key in shared}


@dataclass
class _Fold:
    """The fold in training: the metrics of the folds `before` it, their steps (`offset`), and its own best so far."""

    keep: CheckpointConfig
    before: list[Metrics] = field(default_factory=list)
    offset: int = 0
    best: Metrics = field(default_factory=dict)

    @property
    def number(self) -> int:
        return len(self.before) + 1

    def item(self) -> dict[str, Any]:
        return {"before": self.before, "offset": self.offset, "best": self.best}

    def note(self, metrics: Mapping[str, float]) -> None:
        """Records the metrics of an epoch."""
        monitor = self.keep.monitor
        best = None if monitor is None or not self.best else self.best[monitor]
        if best is None or not math.isfinite(best) or improved(metrics[monitor or ""], best, self.keep.mode):
            self.best = dict(metrics)

    def next(self, steps: int) -> _Fold:
        """Returns the fold after this one, which took `steps`."""
        return _Fold(self.keep, [*self.before, self.best], self.offset + steps)

    def outer(self, ref: CheckpointRef) -> CheckpointRef:
        """Returns a checkpoint of the fold as one of the trial."""
        return replace(ref, step=ref.step + self.offset)

    def inner(self, ref: CheckpointRef) -> CheckpointRef:
        return replace(ref, step=ref.step - self.offset)

    def pinned(self, own: Pinned) -> Pinned:
        """Returns `own`, a function of the fold's steps, as a function of the trial's steps."""
        return lambda step: step > self.offset and own(step - self.offset)


class _Reporter(Relay):
    """A reporter that passes on a fold's reports as the trial's."""

    def __init__(self, reporter: Reporter, at: _Fold) -> None:
        super().__init__(reporter)
        self._at = at

    def report(self, report: Report) -> Verdict:
        if report.epoch is not None:
            self._at.note(report.metrics)
        ref = report.checkpoint and self._at.outer(report.checkpoint)
        step = report.step + self._at.offset
        return self.reporter.report(Report(step, report.metrics, checkpoint=ref, fold=self._at.number))

    def event(self, kind: str, **fields: Any) -> None:
        if "step" in fields:
            fields["step"] += self._at.offset
        self.reporter.event(kind, fold=self._at.number, **fields)

    def artifact(self, path: Path, name: str | None = None) -> None:
        self.reporter.artifact(path, f"fold-{self._at.number}/{name or path.name}")


class _Saver(Saver):
    """A saver of a fold's states with the metrics of earlier folds, under the trial's steps."""

    at: _Fold

    def start(self, state: dict[str, Any], *, step: int, metrics: Mapping[str, float], **rest: Any) -> None:
        if metrics:
            self.at.note(metrics)
        super().start({**state, ITEM: self.at.item()}, step=step + self.at.offset, metrics=metrics, **rest)

    def finish(self) -> CheckpointRef | None:
        ref = super().finish()
        return ref and self.at.inner(ref)


class _Folds(CheckpointStore):
    """The checkpoints of a trial that belong to the fold `at`, by the fold's steps."""

    def __init__(self, trial: CheckpointStore, keep: CheckpointConfig) -> None:
        super().__init__(
            trial.directory,
            trial.fence,
            trial.kept,
            flagged=[*trial.flagged],
            on_change=trial._on_change,
            location=trial.location,
        )
        self.saver = _Saver(trial.directory, trial.fence, trial.saver.config_hash, trial.location)
        # A trial without its own checkpoint, which may have begun from another trial's, is at its first fold.
        newest = super().load_latest()
        self.at = _Fold(keep, **(newest[0].get(ITEM) or {}) if newest and self.owns(newest[1]) else {})
        self.saver.at = self.at

    def begin(self, at: _Fold) -> None:
        """Moves to the next fold."""
        self.at = self.saver.at = at
        self.damaged.clear()  # the previous fold has reported it

    def _own(self, newest: tuple[dict[str, Any], CheckpointRef] | None) -> tuple[dict[str, Any], CheckpointRef] | None:
        if newest is None or (self.owns(newest[1]) and newest[1].step <= self.at.offset):
            return None
        return newest[0], self.at.inner(newest[1])

    def load_latest(self) -> tuple[dict[str, Any], CheckpointRef] | None:
        return self._own(super().load_latest())

    def load_scheduled(self, scheduled: Pinned) -> tuple[dict[str, Any], CheckpointRef] | None:
        return self._own(super().load_scheduled(self.at.pinned(scheduled)))

    def commit(self, ref: CheckpointRef, keep: CheckpointConfig, pinned: Pinned | None = None) -> None:
        super().commit(self.at.outer(ref), keep, pinned)

    def tidy(self, keep: CheckpointConfig, pinned: Pinned | None = None) -> None:
        super().tidy(keep, pinned and self.at.pinned(pinned))
