"""Builds the trials of a report, column by column, in number order.

{
    "number": [int], "state": [str], "epoch": [int], "planned": [int or null], "seconds": [float or null],
    "place": [int or null]       among the complete ones, best first, from 0
    "front": [int or null]       0 if no other trial is better in every objective; with one objective 0
    "ended": [float or null]     seconds from the study's first attempt
    "values": {objective: [float or null]}, "held_out": {objective: [float or null]}
    "why": [str]                 why it was stopped, or the first line of its error
    "tags": {key: [str or null]}
    "settings": {path: [value]}  settings in which configurations differ; null where a parameter is not active
    "searched": [path]           the settings that the study searches
}
A value that is not finite is null, because JSON has no other form for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from hpo.analysis.report.snapshot import Snapshot
from hpo.ledger.rows import AskedTrial
from hpo.ledger.tags import STUDY


def trials(of: Snapshot, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the columns, with the ledger's values to the last digit.

    For a part of the trials `like` is the report of all: the part has the same start of time and the same settings.
    """
    begin = like["timeline"]["began"] if like else began(of)
    settings, nowhere = _settings(of, like and like["trials"]["settings"]), (None, None)
    return {
        **{name: [getattr(trial, name) for trial in of.trials] for name in ("number", "state", "epoch")},
        "planned": [of.planned(trial) for trial in of.trials],
        "seconds": [_seconds(of, trial) for trial in of.trials],
        "place": [of.placed.get(trial.number, nowhere)[1] for trial in of.trials],
        "front": [of.placed.get(trial.number, nowhere)[0] for trial in of.trials],
        "ended": [None if trial.ended_at is None else round(trial.ended_at - begin, 2) for trial in of.trials],
        "values": {metric: [_value(trial, at) for trial in of.trials] for at, metric in enumerate(of.metrics)},
        "held_out": {metric: [held_out(of, t, key) for t in of.trials] for metric, key in of.hold_outs.items()},
        "why": [_why(of, trial) for trial in of.trials],
        "tags": {key: [of.tags.get(t.number, {}).get(key) for t in of.trials] for key in _tag_keys(of)},
        "settings": settings,
        "searched": [path for path in settings if any(path in trial.params for trial in of.trials)],
    }


def began(of: Snapshot) -> float:
    """Returns when the first trial began, in seconds since 1970; without a trial, when the study was created."""
    return min((t.started_at for t in of.trials if t.started_at is not None), default=of.study.created_at)


def held_out(of: Snapshot, trial: AskedTrial, key: str) -> float | None:
    """Returns a trial's value of a held-out metric at the epoch by which it was judged."""
    judged = of.judged.get(trial.id)
    return finite(judged.metrics.get(key)) if judged else None


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _value(trial: AskedTrial, index: int) -> float | None:
    return finite(trial.values[index]) if trial.values else None


def _seconds(of: Snapshot, trial: AskedTrial) -> float | None:
    """Returns the seconds in the attempts of a trial that has ended, without the time between them."""
    tries = of.attempts.get(trial.id, ())
    spent = [attempt.ended_at - attempt.started_at for attempt in tries if attempt.ended_at is not None]
    return None if trial.seconds is None else round(sum(spent) if spent else trial.seconds, 2)


def _tag_keys(of: Snapshot) -> list[str]:
    return sorted({key for number, tags in of.tags.items() if number != STUDY for key in tags})


def _why(of: Snapshot, trial: AskedTrial) -> str:
    stopped = of.stops.get(trial.id, "") if trial.state == "pruned" else ""
    return (trial.error or "").split("\n")[0] or stopped


def _settings(of: Snapshot, known: Collection[str] | None) -> dict[str, list[Any]]:
    """Returns, for each path in which configurations differ, its value in each trial, parameters first.

    A part of the trials may not differ, so there `known` names the paths.
    """
    searched = dict.fromkeys(path for trial in of.trials for path in trial.params)
    paths = dict.fromkeys([*searched, *(path for config in of.configs.values() for path in config)])
    columns: dict[str, list[Any]] = {}
    for path in paths:
        rows = (trial.params if path in searched else of.configs[trial.id] for trial in of.trials)
        column = [_plain(row.get(path)) for row in rows]
        if path in searched or (len({json.dumps(value) for value in column}) > 1 if known is None else path in known):
            columns[path] = column
    return columns


def _plain(value: object) -> Any:
    """Returns a number, a boolean or a text; a value with parts becomes its JSON text."""
    if isinstance(value, float):
        return finite(value)
    return json.dumps(value) if isinstance(value, list | tuple | dict) else value
