"""How much of its workers' time a study has spent waiting, and for what, by the times in the ledger."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from hpo.ledger import worker_queries
from hpo.ledger.rows import Connection, RowMapping
from hpo.ledger.worker_queries import EpochReport

LATEST = 500  # attempts that are looked at


@dataclass(frozen=True)
class Idle:
    """Shares of the time, `seconds` in all, in which workers were ready: the wait for a trial to take, and that at
    rungs for earlier trials to come there, which is estimated: it is what lies between a report that was decided on and
    the next, beyond what an epoch of that attempt takes."""

    seconds: float
    for_a_trial: float
    at_rungs: float

    @property
    def share(self) -> float:
        return self.for_a_trial + self.at_rungs


def idle(connection: Connection, study_id: int, runs: bool, now: float | None = None) -> Idle | None:
    """Of the latest LATEST attempts; None before there are any. `runs` says that what has not ended goes on `now`."""
    tries = worker_queries.latest_attempts(connection, study_id, LATEST)
    if not tries:
        return None
    ended = [one["ended_at"] for one in tries if one["ended_at"] is not None]
    last = (now or time.time()) if runs else max(ended, default=tries[-1]["started_at"])
    ready, waited = 0.0, 0.0
    by_worker: dict[str, list[RowMapping]] = defaultdict(list)
    for one in tries:
        by_worker[one["worker_id"]].append(one)
    for own in by_worker.values():
        span, busy = _span_and_busy(own, whole=len(tries) < LATEST, last=last)
        ready, waited = ready + span, waited + span - busy
    if not ready:
        return None
    reports = worker_queries.epoch_reports(connection, {one["trial_id"] for one in tries})
    return Idle(round(ready, 3), round(waited / ready, 4), round(_at_rungs(tries, reports, last) / ready, 4))


def _span_and_busy(own: Sequence[RowMapping], *, whole: bool, last: float) -> tuple[float, float]:
    """Seconds in which a worker was ready, and those with an attempt; lanes, which overlap, count once.

    One that serves several studies, or whose first attempts are not among these, counts from its first; one that has
    not left in good order up to the end of its last.
    """
    first, end = own[0]["started_at"], max(_end(one, last) for one in own)
    begin = first if own[0]["executor"] == "joined" or not whole else min(own[0]["ready"], first)
    left = own[0]["left"]
    busy, covered = 0.0, begin
    for one in own:
        until = _end(one, last)
        busy += max(0.0, until - max(covered, one["started_at"]))
        covered = max(covered, until)
    return max(end, min(left, last) if left is not None else end) - begin, busy


def _end(attempt: RowMapping, last: float) -> float:
    return max(last if attempt["ended_at"] is None else attempt["ended_at"], attempt["started_at"])


def _at_rungs(tries: Sequence[RowMapping], reports: Sequence[EpochReport], last: float) -> float:
    """Seconds between a report that was decided on and what came next, beyond an epoch of the attempt where that is
    another epoch."""
    of_trial = {trial_id: list(own) for trial_id, own in groupby(reports, key=lambda one: one.trial_id)}
    waited = 0.0
    for one in tries:
        until = _end(one, last)
        own = [r for r in of_trial.get(one["trial_id"], ()) if one["started_at"] <= r.at <= until]
        gaps = [(before.decided, after.at - before.at) for before, after in pairwise(own)]
        epochs = [gap for decided, gap in gaps if not decided]
        if own and own[-1].decided:
            waited += until - own[-1].at
        usual = statistics.median(epochs) if epochs else None
        waited += sum(max(0.0, gap - usual) for decided, gap in gaps if decided and usual is not None)
    return waited
