"""What the machine does, measured by this process."""

import importlib.util
import os
import sys
import time
import tomllib
from types import SimpleNamespace

import psutil
import pytest
from places import ROOT

from hpo.ledger.names import machine_dependent
from hpo.ledger.queries import declared
from hpo.workers.system_metrics import SystemMetrics


def test_a_busy_process_shows_and_a_sleeping_one_does_not():
    metrics = SystemMetrics()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    busy = metrics.read()
    time.sleep(0.2)
    idle = metrics.read()
    assert busy["system/cpu_percent"] > 2 * idle["system/cpu_percent"]
    assert 1 < busy["system/memory_mb"] < 1e5


def test_what_is_written_to_the_disk_shows(tmp_path):
    start = time.monotonic()
    metrics, size, process = SystemMetrics(), 8 * 2**20, psutil.Process()
    before = process.io_counters().write_bytes
    with open(tmp_path / "file", "wb") as file:
        file.write(os.urandom(size))
        file.flush()
        os.fsync(file.fileno())
    if process.io_counters().write_bytes - before < size:
        pytest.skip("runs with --basetemp on a disk: this file system lies in memory")
    written = metrics.read()["system/disk_write_bytes_per_sec"]
    longest = time.monotonic() - start
    assert written * longest >= size
    time.sleep(0.1)
    idle = metrics.read()
    assert idle["system/disk_write_bytes_per_sec"] < written / 10
    for name in ("disk_read", "disk_write", "net_recv", "net_sent"):
        assert idle[f"system/{name}_bytes_per_sec"] >= 0


def test_the_network_is_counted_without_loopback(monkeypatch):
    def counted(recv: int):
        nic = SimpleNamespace(bytes_sent=2 * recv, bytes_recv=recv)
        return lambda pernic: {"eth0": nic, "lo": nic}

    monkeypatch.setattr(psutil, "net_io_counters", counted(1000))
    metrics = SystemMetrics()
    start = time.monotonic()
    time.sleep(0.05)
    monkeypatch.setattr(psutil, "net_io_counters", counted(6000))
    found = metrics.read()
    assert 0 < found["system/net_recv_bytes_per_sec"] <= 5000 / 0.05
    assert found["system/net_recv_bytes_per_sec"] * (time.monotonic() - start) >= 5000
    assert found["system/net_sent_bytes_per_sec"] == 2 * found["system/net_recv_bytes_per_sec"]


def test_the_hottest_sensor_is_told(monkeypatch):
    """By psutil's own types, for machines that have none."""
    group = [psutil._ntuples.shwtemp("", celsius, None, None) for celsius in (41.0, 63.5)]
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: {"coretemp": group, "nvme": group[:1]}, raising=False)
    assert SystemMetrics().read()["system/temperature_c"] == 63.5
    monkeypatch.setattr(psutil, "sensors_temperatures", dict)
    assert "system/temperature_c" not in SystemMetrics().read()


def test_none_of_it_enters_a_digest_or_counts_as_a_differing_replay():
    for key in (*SystemMetrics().read(), "train/gpu_util", "train/samples_per_sec", "system/gpu_memory_mb"):
        assert machine_dependent(key)
        assert not declared(("train/*", "val/*", "system/*"), key)


class Gpu:
    """Stands for torch.cuda, which no test machine has: what each function reads, as torch gives it."""

    def __init__(self) -> None:
        self.cuda = self

    is_initialized = staticmethod(lambda: True)
    max_memory_allocated = staticmethod(lambda: 3 * 2**20)
    reset_peak_memory_stats = staticmethod(lambda: None)
    utilization = staticmethod(lambda: 71)
    power_draw = staticmethod(lambda: 250_500)  # milliwatts
    temperature = staticmethod(lambda: 55)


@pytest.mark.parametrize("installed", [True, False])
def test_a_gpu_is_read_or_what_is_missing_is_named(installed, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", Gpu())
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: installed or None if name == "pynvml" else found(name)
    )
    metrics = SystemMetrics()
    read = metrics.read()
    assert read["system/gpu_memory_mb"] == 3
    named = {"train/gpu_util": 71.0, "system/gpu_power_w": 250.5, "system/gpu_temperature_c": 55.0}
    assert {key: read.get(key) for key in named} == (named if installed else dict.fromkeys(named))
    assert ("pip install 'hpo[gpu]'" in metrics.untold()) is not installed
    metrics.read()
    assert metrics.untold() == "", "it is told once"


def test_the_extra_is_the_package_that_torch_asks_for():
    """torch.cuda.utilization imports pynvml, which nvidia-ml-py installs."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["gpu"] == ["nvidia-ml-py>=12"]
