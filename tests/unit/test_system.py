"""What the machine does, measured by this process."""

import time

from hpo.ledger.reads import declared
from hpo.ledger.tables import machine_dependent
from hpo.system import SystemMetrics


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


def test_none_of_it_enters_a_digest_or_counts_as_a_differing_replay():
    for key in (*SystemMetrics().read(), "train/gpu_util", "train/samples_per_sec", "system/gpu_memory_mb"):
        assert machine_dependent(key)
        assert not declared(("train/*", "val/*", "system/*"), key)
