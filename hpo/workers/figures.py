"""Measures a worker process for a monitoring system: what it spends its time on, and how long its reports take."""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Literal

from hpo.storage.metrics_text import Family, Sample

# at_rung: the verdict on a trial depends on others. no_trial: no trial of the studies waits. no_study: none is driven.
State = Literal["training", "at_rung", "no_trial", "no_study"]
STATES: tuple[State, ...] = ("training", "at_rung", "no_trial", "no_study")
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds


class Figures:
    """Counts what a process does, from its start on. Its one worker counts, and any thread may read."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._state: State = "no_study"
        self._since = now()
        self._seconds = dict.fromkeys(STATES, 0.0)
        self._trials = 0
        self._delays, self._delay = [0] * (len(BOUNDS) + 1), 0.0  # reports by the bound of their delay, and its sum

    def enter(self, state: State) -> None:
        """Counts the time from now on as that of `state`; a trial begins with each `training`."""
        with self._lock:
            self._trials += state == "training"
            self._turn(state)

    @contextmanager
    def waiting_at_a_rung(self) -> Generator[None]:
        """Counts the time in the block as that of a trial at a rung."""
        with self._lock:
            before = self._state
            self._turn("at_rung")
        try:
            yield
        finally:
            with self._lock:
                self._turn(before)

    @contextmanager
    def reporting(self, reports: int) -> Generator[None]:
        """Counts `reports` whose transaction takes as long as the block; not if it raises."""
        begin = self._now()
        yield
        with self._lock:
            delay = self._now() - begin
            self._delays[bisect_left(BOUNDS, delay)] += reports
            self._delay += delay * reports

    def families(self) -> list[Family]:
        """Returns what was measured up to now."""
        with self._lock:
            self._turn(self._state)
            seconds, trials, delays, delay = dict(self._seconds), self._trials, [*self._delays], self._delay
        meaning = "Time by what the worker did: training, or idle for want of a verdict, a trial or a study."
        by_state = [Sample(value, {"state": state}) for state, value in seconds.items()]
        return [
            Family("hpo_worker_seconds", "counter", meaning, by_state),
            Family("hpo_worker_trials", "counter", "Trials and groups of trials that it has begun.", [Sample(trials)]),
            Family("hpo_worker_report_seconds", "histogram", "Time in which reports commit.", _buckets(delays, delay)),
            *_gpu(),
        ]

    def _turn(self, state: State) -> None:
        now = self._now()
        self._seconds[self._state] += now - self._since
        self._state, self._since = state, now


def _buckets(counts: list[int], total: float) -> Iterator[Sample]:
    below = 0
    for bound, count in zip((*map(str, BOUNDS), "+Inf"), counts, strict=True):
        below += count
        yield Sample(below, {"le": bound}, "_bucket")
    yield Sample(below, suffix="_count")
    yield Sample(total, suffix="_sum")


def _gpu() -> Iterator[Family]:
    """Yields the memory of the current GPU once this process has initialized torch on one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    free, whole = torch.cuda.mem_get_info()
    meaning = "Memory of the current GPU that is in use, by all processes."
    yield Family("hpo_worker_gpu_memory_bytes", "gauge", meaning, [Sample(whole - free)])
    yield Family("hpo_worker_gpu_memory_limit_bytes", "gauge", "Memory of the current GPU.", [Sample(whole)])
