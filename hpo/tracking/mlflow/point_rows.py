"""Writes the points of a run's metrics in MLflow's tables."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

from hpo.tracking.base import Point
from hpo.tracking.rows import LARGEST


def write_points(rows: sqlite3.Connection, run_id: str, points: Sequence[Point]) -> None:
    """Writes the points of a run, and the latest of each metric."""
    written = [(p.key, p.step, p.timestamp, *stored(p.value)) for p in points]
    rows.executemany(
        "INSERT OR IGNORE INTO metrics (run_uuid, key, step, timestamp, value, is_nan) VALUES (?, ?, ?, ?, ?, ?)",
        [(run_id, *row) for row in written],
    )
    latest: dict[str, tuple[Any, ...]] = {}
    for row in written:
        latest[row[0]] = max(row, latest.get(row[0], row), key=lambda point: point[1:4])
    rows.executemany(
        "INSERT INTO latest_metrics (run_uuid, key, step, timestamp, value, is_nan) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (run_uuid, key) DO UPDATE SET step = excluded.step, timestamp = excluded.timestamp, "
        "value = excluded.value, is_nan = excluded.is_nan WHERE (excluded.step, excluded.timestamp, excluded.value)"
        " > (latest_metrics.step, latest_metrics.timestamp, latest_metrics.value)",
        [(run_id, *row) for row in latest.values()],
    )


def stored(value: float) -> tuple[float, bool]:
    """Returns a value as MLflow stores it, and whether it is NaN."""
    if math.isnan(value):
        return 0.0, True
    return (math.copysign(LARGEST, value) if math.isinf(value) else value), False


def milliseconds() -> int:
    """Returns the current time in MLflow's unit, milliseconds."""
    return int(time.time() * 1000)
