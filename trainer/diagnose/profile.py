"""Profiles a step's time by torch's profiler over a few windows."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

TOP = 10


@dataclass(frozen=True)
class Cost:
    """An operation's own time, without the operations it calls: on the GPU if there is one, else on the CPU."""

    name: str
    calls: int  # in all steps
    ms: float  # a step
    share: float  # of all operations' time


def profiled(step: Callable[[], object], steps: int, trace: Path) -> list[Cost]:
    """Returns the most expensive operations of `steps` calls of `step`.

    A Chrome trace of all is written to `trace` (.json or .json.gz, for chrome://tracing or ui.perfetto.dev).
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read at its first use; else it logs each start and stop
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    column = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    times = {event.key: (event.count, getattr(event, column)) for event in profiler.key_averages()}
    whole = sum(us for _, us in times.values()) or 1.0
    dearest = sorted(times, key=lambda name: times[name][1], reverse=True)[:TOP]
    return [Cost(name, times[name][0], times[name][1] / 1000 / steps, times[name][1] / whole) for name in dearest]
