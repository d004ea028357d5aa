"""Trains a task several times inside one trial, each time from the beginning: once for each fold or for each seed.

Each fold reports under its own number, from 1. After each, the means over the folds so far are reported as those of
the trial, where a fold takes the place of an epoch: so whatever compares trials by epoch compares them by folds, and
may stop or pause one between two of them. What is said of folds here holds for seeds, which divide no data: the first
is the configuration's own, so that it trains as the trial without others would.

Steps go on from fold to fold. What the folds before have come to is saved with every checkpoint, so a trial resumes in
the middle of any of them, as exactly as one that has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from trainer.checkpoint.store import CheckpointStore
from trainer.config import CheckpointConfig, TrainConfig
from trainer.loop import Watch, fit
from trainer.report import ENDS, CheckpointRef, Outcome, Reporter, Verdict
from trainer.runtime.compare import improved
from trainer.runtime.process_state import kept
from trainer.runtime.seeding import derive
from trainer.task import Task

ITEM = "folds"  # of a saved state
_SET_LATER = ("number", "shared")  # of a task, by who made it
Metrics = dict[str, float]


def fit_folds(
    task: Task, config: TrainConfig, reporter: Reporter, checkpoints: CheckpointStore, watch: Watch | None = None
) -> Outcome:
    """`fit` for each of `config.folds` folds of `task`, or under each of `config.seeds` seeds. What a fold counts by
    are its metrics of the epoch that is the best by `checkpoint.monitor`, of the last one where that is None. Raises
    what `fit` does."""
    at = _Fold.of(checkpoints, config.checkpoint)
    while True:
        with kept():  # a trial that goes on in its second fold has not trained its first in this process
            fold, own = _part(task, config, len(at.before))
            outcome = fit(fold, own, _Reporter(reporter, at), _Store(checkpoints, at), watch)  # type: ignore[arg-type]
        ended = replace(outcome, step=at.offset + outcome.step, epoch=len(at.before))
        if outcome.kind != "complete":
            return ended
        at = at.next(outcome.step)
        done = len(at.before)
        judged = _mean(at.before) if config.seeds == 1 else {**_spread(at.before), **_mean(at.before)}
        verdict = reporter.report(at.offset, judged, epoch=done)
        if done == config.parts:
            return replace(ended, epoch=done)
        if verdict.kind in ENDS:
            return replace(ended, kind=ENDS[verdict.kind], epoch=done)


def _part(task: Task, config: TrainConfig, number: int) -> tuple[Task, TrainConfig]:
    """The task and configuration of one fold, or of one seed; counted from 0."""
    if config.folds > 1:
        return task.in_fold(number, config.folds), config
    if number == 0:
        return task, config
    own = config.model_copy(update={"seed": derive(config.seed, "repeat", number)})
    again = type(task)(task.config.model_copy(update={"train": own}))
    vars(again).update({name: vars(task)[name] for name in _SET_LATER if name in vars(task)})
    return again, own


def _spread(seeds: Collection[Metrics]) -> Metrics:
    """`NAME/std`, the sample standard deviation of each metric that every seed has, and `NAME/low` and `NAME/high`, the
    mean less and plus its standard error; of one seed, whose spread is unknown, low and high are its value."""
    spread: Metrics = {}
    for key, mean in _mean(seeds).items():
        if key.startswith(("time/", "system/")) or key.endswith("per_sec"):
            continue
        error = 0.0
        if len(seeds) > 1:
            values = [one[key] for one in seeds]
            spread[f"{key}/std"] = stdev(values) if all(map(math.isfinite, values)) else math.nan
            error = spread[f"{key}/std"] / math.sqrt(len(seeds))
        spread |= {f"{key}/low": mean - error, f"{key}/high": mean + error}
    return spread


def _mean(folds: Collection[Metrics]) -> Metrics:
    """Of each metric that every fold has."""
    shared = set.intersection(*(set(one) for one in folds))
    return {key: fmean(one[key] for one in folds) for key in next(iter(folds)) if key in shared}


@dataclass
class _Fold:
    """The fold that is trained: the metrics that those `before` it count by, the steps they took (`offset`), and its
    own best so far."""

    keep: CheckpointConfig
    before: list[Metrics] = field(default_factory=list)
    offset: int = 0
    best: Metrics = field(default_factory=dict)
    damage_told: bool = False

    @classmethod
    def of(cls, checkpoints: CheckpointStore, keep: CheckpointConfig) -> _Fold:
        """As the newest checkpoint has it; a trial that has none, or begins with another trial's, is at its first."""
        found = checkpoints.load_latest()
        return cls(keep, **(found[0].get(ITEM) or {}) if found and checkpoints.owns(found[1]) else {})

    @property
    def number(self) -> int:
        return len(self.before) + 1

    def item(self) -> dict[str, Any]:
        return {"before": self.before, "offset": self.offset, "best": self.best}

    def note(self, metrics: Mapping[str, float]) -> None:
        """An epoch has come to these."""
        monitor = self.keep.monitor
        best = None if monitor is None or not self.best else self.best[monitor]
        if best is None or not math.isfinite(best) or improved(metrics[monitor or ""], best, self.keep.mode):
            self.best = dict(metrics)

    def next(self, steps: int) -> _Fold:
        """The fold after this one, which took `steps`."""
        return _Fold(self.keep, [*self.before, self.best], self.offset + steps, damage_told=True)

    def outer(self, ref: CheckpointRef) -> CheckpointRef:
        """A checkpoint of the fold as one of the trial."""
        return replace(ref, step=ref.step + self.offset)

    def inner(self, ref: CheckpointRef) -> CheckpointRef:
        return replace(ref, step=ref.step - self.offset)

    def pinned(self, own: Callable[[int], bool] | None) -> Callable[[int], bool] | None:
        return own and (lambda step: step > self.offset and own(step - self.offset))


@dataclass
class _Reporter:
    """Reports of a fold as those of the trial."""

    reporter: Reporter
    at: _Fold

    @property
    def preempted(self) -> bool:
        return self.reporter.preempted

    def report(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        epoch: int | None = None,
        fold: int = 0,
        checkpoint: CheckpointRef | None = None,
    ) -> Verdict:
        if epoch is not None:
            self.at.note(metrics)
        ref = checkpoint and self.at.outer(checkpoint)
        return self.reporter.report(step + self.at.offset, metrics, fold=self.at.number, checkpoint=ref)

    def event(self, kind: str, **fields: Any) -> None:
        if "step" in fields:
            fields["step"] += self.at.offset
        self.reporter.event(kind, fold=self.at.number, **fields)

    def artifact(self, path: Path, name: str | None = None) -> None:
        self.reporter.artifact(path, f"fold-{self.at.number}/{name or path.name}")

    def tag(self, key: str, value: str) -> None:
        self.reporter.tag(key, value)


class _Saver:
    """Saves a fold's states with what the folds before it have come to."""

    def __init__(self, saver: Any, at: _Fold) -> None:
        self._saver, self._at = saver, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._saver, name)

    def start(
        self, state: dict[str, Any], *, step: int, epoch: int, metrics: Mapping[str, float], background: bool
    ) -> None:
        if metrics:
            self._at.note(metrics)
        state, step = {**state, ITEM: self._at.item()}, step + self._at.offset
        self._saver.start(state, step=step, epoch=epoch, metrics=metrics, background=background)

    def finish(self) -> CheckpointRef | None:
        ref = self._saver.finish()
        return ref and self._at.inner(ref)


class _Store:
    """The checkpoints of one fold, among those of the trial."""

    def __init__(self, store: CheckpointStore, at: _Fold) -> None:
        self._store, self._at = store, at
        self.saver = _Saver(store.saver, at)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @property
    def damaged(self) -> list[Any]:
        return [] if self._at.damage_told else self._store.damaged

    def _own(self, found: tuple[dict[str, Any], CheckpointRef] | None) -> Any:
        if found is None or not self._store.owns(found[1]) or found[1].step > self._at.offset:
            return found and (found[0], self._at.inner(found[1]))
        return None

    def load_latest(self) -> tuple[dict[str, Any], CheckpointRef] | None:
        return self._own(self._store.load_latest())

    def load_scheduled(self, scheduled: Callable[[int], bool]) -> tuple[dict[str, Any], CheckpointRef] | None:
        pinned = self._at.pinned(scheduled)
        assert pinned is not None
        return self._own(self._store.load_scheduled(pinned))

    def commit(self, ref: CheckpointRef, keep: CheckpointConfig, pinned: Callable[[int], bool] | None = None) -> None:
        self._store.commit(self._at.outer(ref), keep, self._at.pinned(pinned))

    def tidy(self, keep: CheckpointConfig, pinned: Callable[[int], bool] | None = None) -> None:
        self._store.tidy(keep, self._at.pinned(pinned))
