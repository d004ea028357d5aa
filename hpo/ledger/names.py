"""Limits the names of metrics and events, and lists the metrics that depend on the machine."""

from __future__ import annotations

from sqlalchemy import Column, String

from hpo.ledger.database.tables import events, reports


def _longest(column: Column[str]) -> int:
    assert isinstance(column.type, String) and column.type.length is not None, "the column has a length"
    return column.type.length


MAX_METRIC, MAX_EVENT_KIND = _longest(reports.c.key), _longest(events.c.kind)  # characters

# The trainer's and the worker's metrics of the machine, besides `system/...`, `time/...` and `train/..._per_sec`.
MACHINE_METRICS = ("train/gpu_util", "train/mfu")


def machine_dependent(key: str) -> bool:
    """Returns True for metrics that depend on the machine: clocks, load, throughput.

    They may differ in a replay; no digest includes them.
    """
    rate = key.startswith("train/") and key.endswith("_per_sec")
    return rate or key.startswith(("system/", "time/")) or key in MACHINE_METRICS
