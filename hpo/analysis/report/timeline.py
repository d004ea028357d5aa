"""Builds the timeline of a study: which worker trained which trial, and when.

{
    "workers": [str]              a label each, such as `box:4711`, by their first begin
    "began": float                seconds since 1970 of the first attempt; all times are seconds from it
    "now": float or null          the time of reading, if the study runs
    "spans": {"worker": [int], "trial": [int], "begin": [float], "end": [float or null], "outcome": [str]}
    "pauses": {"trial": [int], "begin": [float], "end": [float or null]}   from a pause to the next attempt
    "resumed": [float]            when the study was resumed in another environment
    "breaks": {"begin": [float], "end": [float]}   times in which no attempt ran, which a time axis leaves out
}
An attempt without an end runs, or its worker is gone and that has not been noticed: `outcome` is then `running`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hpo.analysis.report.cost import covered
from hpo.analysis.report.snapshot import Snapshot
from hpo.analysis.report.trials import began

BREAK = 0.05  # share of the time in which attempts ran, from which on a time without any is a break


def timeline(of: Snapshot) -> dict[str, Any]:
    """Returns all attempts in the order of their start."""
    begin = began(of)
    number = {trial.id: trial.number for trial in of.trials}
    tries = sorted((row for rows in of.attempts.values() for row in rows), key=lambda row: row.started_at)
    workers = list(dict.fromkeys((row.worker_id, f"{row.host}:{row.pid}") for row in tries))
    index = {worker: i for i, (worker, _) in enumerate(workers)}

    def since(at: float | None) -> float | None:
        return None if at is None else round(at - begin, 2)

    pauses = [
        (number[id_], since(before.ended_at), since(after.started_at) if after else None)
        for id_, rows in of.attempts.items()
        for before, after in pairwise([*rows, None])
        if before is not None and before.outcome == "paused"
    ]
    spans = [(row.started_at, row.ended_at or max(of.read_at, row.started_at)) for row in tries]
    empty = [(since(begun), since(ended)) for begun, ended in breaks(spans)]
    return {
        "workers": [label for _, label in workers],
        "began": begin,
        "now": since(of.read_at) if of.status.state == "running" else None,
        "spans": {
            "worker": [index[row.worker_id] for row in tries],
            "trial": [number[row.trial_id] for row in tries],
            "begin": [since(row.started_at) for row in tries],
            "end": [since(row.ended_at) for row in tries],
            "outcome": [row.outcome or "running" for row in tries],
        },
        "pauses": dict(zip(("trial", "begin", "end"), map(list, zip(*pauses, strict=True)), strict=True))
        if pauses
        else {"trial": [], "begin": [], "end": []},
        "resumed": [since(event.at) for event in of.befell if event.kind == "environment"],
        "breaks": {"begin": [begun for begun, _ in empty], "end": [ended for _, ended in empty]},
    }


def breaks(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the gaps between spans, in order of time, that last more than BREAK of the time that the spans cover."""
    shortest = BREAK * covered(spans)
    gaps, reached = list[tuple[float, float]](), math.inf
    for begin, end in sorted(spans):
        if begin - reached > shortest:
            gaps.append((reached, begin))
        reached = max(reached, end) if reached < math.inf else end
    return gaps
