"""Who trained what, and when.

{
    "workers": [str]              a label each, such as `box:4711`, by their first begin
    "began": float                seconds since 1970 of the first attempt; all times are seconds from it
    "now": float or null          of a study that runs: when this was read
    "spans": {"worker": [int], "trial": [int], "begin": [float], "end": [float or null], "outcome": [str]}
    "pauses": {"trial": [int], "begin": [float], "end": [float or null]}   from a pause to the next attempt
    "resumed": [float]            when the study was driven on, elsewhere or otherwise than before
}
An attempt without an end runs, or its worker is gone and nobody has noticed yet: `outcome` is then `running`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hpo.analysis.report.snapshot import Snapshot
from hpo.analysis.report.trials import began


def timeline(of: Snapshot) -> dict[str, Any]:
    """All attempts, by their begin."""
    begin = began(of)
    number = {trial["id"]: trial["number"] for trial in of.trials}
    tries = sorted((one for own in of.attempts.values() for one in own), key=lambda one: one["started_at"])
    workers = list(dict.fromkeys((one["worker_id"], f"{one['host']}:{one['pid']}") for one in tries))
    index = {worker: i for i, (worker, _) in enumerate(workers)}

    def since(at: float | None) -> float | None:
        return None if at is None else round(at - begin, 2)

    pauses = [
        (number[id_], since(one["ended_at"]), since(after["started_at"]) if after else None)
        for id_, own in of.attempts.items()
        for one, after in pairwise([*own, None])
        if one is not None and one["outcome"] == "paused"
    ]
    return {
        "workers": [label for _, label in workers],
        "began": begin,
        "now": since(of.read_at) if of.status.state == "running" else None,
        "spans": {
            "worker": [index[one["worker_id"]] for one in tries],
            "trial": [number[one["trial_id"]] for one in tries],
            "begin": [since(one["started_at"]) for one in tries],
            "end": [since(one["ended_at"]) for one in tries],
            "outcome": [one["outcome"] or "running" for one in tries],
        },
        "pauses": dict(zip(("trial", "begin", "end"), map(list, zip(*pauses, strict=True)), strict=True))
        if pauses
        else {"trial": [], "begin": [], "end": []},
        "resumed": [since(event["at"]) for event in of.befell if event["kind"] == "environment"],
    }
