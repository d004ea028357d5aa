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
    """Shares of the time, `seconds` in all, in which workers were ready: the wait for a trial to take; that at rungs
    for earlier trials to come there, which is estimated: it is what lies between a report that was decided on and the
    next, beyond what an epoch of that attempt takes; and at the end of a study, while others trained its last trials.
    """

    seconds: float
    for_a_trial: float
    at_rungs: float
    at_the_end: float

    @property
    def share(self) -> float:
        return round(self.for_a_trial + self.at_rungs + self.at_the_end, 4)


def idle(connection: Connection, study_id: int, runs: bool, now: float | None = None) -> Idle | None:
    """Of the latest LATEST attempts; None before there are any. `runs` says that what has not ended goes on `now`."""
    tries = worker_queries.latest_attempts(connection, study_id, LATEST)
    if not tries:
        return None
    reports = worker_queries.epoch_reports(connection, {one["trial_id"] for one in tries})
    seen = [one["ended_at"] for one in tries if one["ended_at"] is not None] + [report.at for report in reports]
    last = (now or time.time()) if runs else max(seen, default=tries[-1]["started_at"])  # what was killed has no end
    ready = between = at_the_end = 0.0
    by_worker: dict[str, list[RowMapping]] = defaultdict(list)
    for one in tries:
        by_worker[one["worker_id"]].append(one)
    for own in by_worker.values():
        gaps, busy, rest = _parts(own, whole=len(tries) < LATEST, last=last)
        ready += gaps + busy + rest
        between, at_the_end = (between + gaps + rest, 0.0) if runs else (between + gaps, at_the_end + rest)
    if not ready:
        return None
    shares = (round(part / ready, 4) for part in (between, _at_rungs(tries, reports, last), at_the_end))
    return Idle(round(ready, 3), *shares)


def _parts(own: Sequence[RowMapping], *, whole: bool, last: float) -> tuple[float, float, float]:
    """Seconds of a worker before and between its attempts, in them, and after the last; lanes, which overlap, count
    once.

    One that serves several studies, or whose first attempts are not among these, counts from its first; one that has
    not left in good order up to the end of its last.
    """
    first = own[0]["started_at"]
    begin = first if own[0]["executor"] == "joined" or not whole else min(own[0]["ready"], first)
    left = own[0]["left"]
    busy, covered = 0.0, begin
    for one in own:
        until = _end(one, last)
        busy += max(0.0, until - max(covered, one["started_at"]))
        covered = max(covered, until)
    return covered - begin - busy, busy, 0.0 if left is None else max(0.0, min(left, last) - covered)


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
