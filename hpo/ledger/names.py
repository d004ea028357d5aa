"""Names of metrics and of events: how long the ledger takes them, and which metrics the machine decides."""

from __future__ import annotations

from sqlalchemy import Column, String

from hpo.ledger.tables import events, reports


def _longest(column: Column[str]) -> int:
    assert isinstance(column.type, String) and column.type.length is not None, "the column has a length"
    return column.type.length


MAX_METRIC, MAX_EVENT_KIND = _longest(reports.c.key), _longest(events.c.kind)  # characters

# What the trainer and the worker report of the machine, besides `system/...`, `time/...` and `train/..._per_sec`.
MACHINE_METRICS = ("train/gpu_util", "train/mfu")


def machine_dependent(key: str) -> bool:
    """Metrics that the machine decides: clocks, load, throughput. A replay may differ in them; no digest has them."""
    rate = key.startswith("train/") and key.endswith("_per_sec")
    return rate or key.startswith(("system/", "time/")) or key in MACHINE_METRICS
