"""What the machine does while a trial trains: metrics under `system/`, which never enter a digest."""

from __future__ import annotations

import importlib.util
import os
import sys
import time

import psutil


class SystemMetrics:
    """Measures from one reading to the next; this process's share, not its neighbours'.

    system/cpu_percent     processor time of this process over wall time, 100 for one busy core
    system/memory_mb       resident memory, MiB
    system/gpu_memory_mb   the most memory torch has allocated on the current GPU since the last reading, MiB
    train/gpu_util         the GPU's utilisation in percent as NVML samples it, where nvidia-ml-py is installed
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._last = self._now()

    def read(self) -> dict[str, float]:
        (wall, cpu), (last_wall, last_cpu) = self._now(), self._last
        self._last = wall, cpu
        elapsed = max(wall - last_wall, 1e-9)
        metrics = {
            "system/cpu_percent": 100 * (cpu - last_cpu) / elapsed,
            "system/memory_mb": self._process.memory_info().rss / 2**20,
        }
        return metrics | _gpu()

    @staticmethod
    def _now() -> tuple[float, float]:
        times = os.times()
        return time.monotonic(), times.user + times.system


def _gpu() -> dict[str, float]:
    """Nothing unless the trial itself has brought torch up on a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    metrics = {"system/gpu_memory_mb": torch.cuda.max_memory_allocated() / 2**20}
    torch.cuda.reset_peak_memory_stats()
    if importlib.util.find_spec("pynvml") is not None:
        metrics["train/gpu_util"] = float(torch.cuda.utilization())
    return metrics
