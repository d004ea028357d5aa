"""Measures the time of a step of a trial, on its own and as one of several lanes."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.checkpoint.store import CheckpointStore
from trainer.config import TrainConfig
from trainer.errors import Stopped
from trainer.lanes.group import Group
from trainer.loop import fit
from trainer.report import Report, Reporter, Silent
from trainer.runtime.device import pick_device
from trainer.task import Task

WARM, FEWEST = 3, 5  # steps before the first that is timed, and the least number of timed ones
GLANCE, LONGEST = 0.2, 2.5  # shares of the seconds: after GLANCE it may stop, after LONGEST it does within an epoch


def solo(make: Callable[[], Task], config: TrainConfig, seconds: float, worth: float = 0.0) -> tuple[float, int]:
    """Returns the seconds of a step of `fit`, and how many steps a trial has. `config.lanes` is 1; see also `fused`.

    A trial that seems to take less than `worth` seconds is measured for GLANCE of the time.
    """
    clock, total = _Clock(seconds, config), 0

    def begun(run: Any) -> None:
        nonlocal total
        total, clock.least, clock.windows = run.total, worth / max(1, run.total), run.state.windows

    with tempfile.TemporaryDirectory() as directory, suppress(_Enough):
        fit(make(), config, clock, _store(directory, 0), begun)
    return clock.step, total


def fused(make: Callable[[], Task], config: TrainConfig, seconds: float) -> float:
    """Returns the seconds of a step of one of `config.lanes` lanes: the seconds of all of them over their number.

    Each lane does the work at the end of an epoch separately, so whole epochs are measured, unless one takes longer
    than LONGEST times `seconds`. Returns NaN if training ends too early to tell, or if there is not enough memory.
    Raises ConfigError if lanes cannot train the task, and any error of the task.
    """
    clock = _Clock(seconds, config)
    reporters: list[Reporter] = [clock, *(Silent() for _ in range(config.fixed_lanes - 1))]
    with tempfile.TemporaryDirectory() as directory, Group(config, _commit) as group:
        for number, reporter in enumerate(reporters):
            clock.windows = group.admit(make(), config, reporter, _store(directory, number)).state.windows
        with suppress(_Enough):
            while group.lanes:
                for _, how in group.advance():
                    if isinstance(how, BaseException):
                        raise how
    return clock.step / len(reporters) if group.size == len(reporters) else math.nan  # memory ran out for some


class _Enough(Stopped):
    """Raised to end a training that has been measured."""


class _Clock(Silent):
    """Times the steps: the trainer asks it before every step whether to leave.

    On a CPU it counts processor time, which other work on the machine does not prolong.
    """

    least = 0.0  # seconds of a step; from here on it is measured for longer than a glance
    windows = 1  # steps of an epoch

    def __init__(self, seconds: float, config: TrainConfig) -> None:
        self._seconds, self._began, self._times = seconds, math.inf, list[float]()
        self._time = time.process_time if pick_device(config.device).type == "cpu" else time.perf_counter

    @property
    def preempted(self) -> bool:
        self._times.append(self._time())
        if len(self._times) == WARM + 1:
            self._began = time.perf_counter()
        if len(self._times) > WARM + FEWEST:
            passed = (time.perf_counter() - self._began) / self._seconds
            enough = passed > 1.0 and (self._whole > 0 or passed > LONGEST)
            if enough or (passed > GLANCE and self.step < self.least):
                raise _Enough
        return False

    @property
    def _whole(self) -> int:
        """Returns the number of timed steps that make up whole epochs."""
        return (len(self._times) - 1 - WARM) // self.windows * self.windows

    @property
    def step(self) -> float:
        counted = self._times[WARM:]
        last = self._whole or len(counted) - 1
        return (counted[last] - counted[0]) / last if len(counted) > FEWEST else math.nan


def _store(directory: str, number: int) -> CheckpointStore:
    return CheckpointStore(Path(directory) / str(number), fence=1)


def _commit(reports: Sequence[tuple[Reporter, Report]], wait: bool) -> list[Any]:
    return [reporter.report(report) for reporter, report in reports]
