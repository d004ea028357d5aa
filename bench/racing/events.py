"""What a contender had reported, and when: read from its own records after it was killed.

hpo's ledger and MLflow's database both have a time for each value, so nothing is added to a program for the race. Of
each contender every value counts that stands in its record with a time within the budget.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Of the newest study: a home may hold an earlier one.
LEDGER = (
    "SELECT at, trials.number, reports.epoch, key, value FROM reports JOIN trials ON trials.id = trial_id "
    "WHERE study_id = (SELECT max(id) FROM studies) AND reports.epoch IS NOT NULL AND key IN (?, ?)"
)
MLFLOW = "SELECT timestamp / 1000.0, run_uuid, step, key, value FROM metrics WHERE is_nan = 0 AND key IN (?, ?)"


@dataclass(frozen=True)
class Event:
    """An epoch that was reported: `seconds` since the command, and the values of validation and held-out data."""

    seconds: float
    trial: str
    epoch: int
    value: float
    held_out: float | None


def events(directory: Path, workload: Mapping[str, Any], started: float, budget: float) -> list[Event]:
    """All epochs that were reported within the budget, by time."""
    names = workload["metric"], workload["held_out"]
    ledger, mlflow = directory / "home" / "ledger.db", directory / "mlflow.db"
    rows = _rows(ledger, LEDGER, names) if ledger.exists() else _rows(mlflow, MLFLOW, names) if mlflow.exists() else []
    found: dict[tuple[str, int], dict[str, tuple[float, float]]] = {}
    for at, trial, epoch, key, value in rows:
        if value is not None:
            found.setdefault((str(trial), epoch), {})[key] = at - started, value
    known = [(trial, epoch, values) for (trial, epoch), values in found.items() if names[0] in values]
    made = [
        Event(values[names[0]][0], trial, epoch, values[names[0]][1], values.get(names[1], (None, None))[1])
        for trial, epoch, values in known
    ]
    return sorted((event for event in made if event.seconds <= budget), key=lambda event: event.seconds)


def _rows(database: Path, query: str, names: Sequence[str]) -> list[Any]:
    """None where the tables were not made before the budget was over."""
    connection = sqlite3.connect(database)
    try:
        return connection.execute(query, names).fetchall()
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            return []
        raise
    finally:
        connection.close()


def improvements(found: Iterable[Event], mode: str) -> list[tuple[float, float, float | None]]:
    """(seconds, best value, its held-out value) each time that the best value of any epoch of any trial improves."""
    sign = 1.0 if mode == "maximize" else -1.0
    curve: list[tuple[float, float, float | None]] = []
    for event in found:
        if not curve or sign * event.value > sign * curve[-1][1]:
            curve.append((round(event.seconds, 3), event.value, event.held_out))
    return curve
