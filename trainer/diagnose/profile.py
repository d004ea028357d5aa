"""Where a step's time goes: torch's profiler over a few windows."""

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
    """An operation's own time, that of what it calls apart: on the GPU where there is one, else on the CPU."""

    name: str
    calls: int  # in all steps
    ms: float  # a step
    share: float  # of all operations' time


def profiled(step: Callable[[], object], steps: int, trace: Path) -> list[Cost]:
    """The dearest operations of `steps` calls of `step`; a Chrome trace of all is written to `trace` (.json or
    .json.gz, for chrome://tracing or ui.perfetto.dev)."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read at its first use; it tells stderr of each start and stop
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    times = {one.key: (one.count, getattr(one, of)) for one in profiler.key_averages()}
    whole = sum(us for _, us in times.values()) or 1.0
    dearest = sorted(times, key=lambda name: times[name][1], reverse=True)[:TOP]
    return [Cost(name, times[name][0], times[name][1] / 1000 / steps, times[name][1] / whole) for name in dearest]
