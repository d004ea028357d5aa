"""Measures the machine while a trial trains: metrics under `system/`, which never enter a digest."""

from __future__ import annotations

import importlib.util
import os
import sys
import time

import psutil


class SystemMetrics:
    """Measures from one reading to the next; this process alone, without its neighbours, except for the network.

    system/cpu_percent              processor time of this process over wall time, 100 for one busy core
    system/memory_mb                resident memory, MiB
    system/disk_read_bytes_per_sec  read from disks by this process, without the page cache, and written to them, if the
    system/disk_write_bytes_per_sec   operating system counts it by process; loader workers are others
    system/net_recv_bytes_per_sec   received and sent by the whole machine on all interfaces but loopback, since no
    system/net_sent_bytes_per_sec     operating system counts that by process
    system/gpu_memory_mb            the most memory torch has allocated on the current GPU since the last reading, MiB
    system/temperature_c            the hottest of the machine's sensors, if the operating system shows any
    system/gpu_temperature_c        the GPU's, by NVML, which the package of the extra `gpu` reads, and
    system/gpu_power_w                its power in watts, and
    train/gpu_util                    its utilization in percent
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._last = self._now()
        self._untold: str | None = ""  # None once it was returned

    def read(self) -> dict[str, float]:
        now, last = self._now(), self._last
        self._last = now
        elapsed = max(now["wall"] - last["wall"], 1e-9)
        metrics = {
            "system/cpu_percent": 100 * (now["cpu"] - last["cpu"]) / elapsed,
            "system/memory_mb": self._process.memory_info().rss / 2**20,
        }
        for name in (name for name in _TRANSFERS if name in now and name in last):
            metrics[f"system/{name}_bytes_per_sec"] = max(now[name] - last[name], 0) / elapsed
        return metrics | _temperature() | self._gpu()

    def untold(self) -> str:
        """Returns, once, the figures of a GPU that cannot be measured, and the fix; empty if there is nothing to
        report."""
        notice, self._untold = self._untold, None if self._untold else self._untold
        return notice or ""

    def _gpu(self) -> dict[str, float]:
        """Returns metrics only if the trial itself has initialized torch on a GPU."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return {}
        metrics = {"system/gpu_memory_mb": torch.cuda.max_memory_allocated() / 2**20}
        torch.cuda.reset_peak_memory_stats()
        if importlib.util.find_spec("pynvml") is None:
            self._untold = NO_NVML if self._untold is not None else None
            return metrics
        metrics |= {"train/gpu_util": float(torch.cuda.utilization())}
        metrics |= {"system/gpu_power_w": torch.cuda.power_draw() / 1000}
        return metrics | {"system/gpu_temperature_c": float(torch.cuda.temperature())}

    def _now(self) -> dict[str, float]:
        """Returns seconds and bytes, each counted from its own start."""
        times = os.times()
        now: dict[str, float] = {"wall": time.monotonic(), "cpu": times.user + times.system}
        if hasattr(self._process, "io_counters"):
            disk = self._process.io_counters()
            now |= {"disk_read": disk.read_bytes, "disk_write": disk.write_bytes}
        net = psutil.net_io_counters(pernic=True)
        for name in ("recv", "sent"):
            now[f"net_{name}"] = sum(getattr(io, f"bytes_{name}") for nic, io in net.items() if nic not in _LOOPBACK)
        return now


NO_NVML = (
    "the GPU's utilisation, power and temperature are not measured, since nvidia-ml-py is missing: "
    "pip install 'hpo[gpu]'"
)
_TRANSFERS = ("disk_read", "disk_write", "net_recv", "net_sent")
_LOOPBACK = ("lo", "lo0", "Loopback Pseudo-Interface 1")


def _temperature() -> dict[str, float]:
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    celsius = [sensor.current for group in sensors.values() for sensor in group]
    return {"system/temperature_c": max(celsius)} if celsius else {}
