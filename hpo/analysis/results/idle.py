"""Computes from the ledger's times which share of their time a study's workers waited, and for what."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from hpo.ledger.rows import Connection, WorkedAttempt
from hpo.ledger.views import workers as worker_queries
from hpo.ledger.views.workers import EpochReport

LATEST = 500  # attempts that are read


@dataclass(frozen=True)
class Idle:
    """Shares of the time in which workers were ready, which is `seconds` in all.

    for_a_trial  the wait for a trial to train
    at_rungs     the estimated wait at rungs for earlier trials to arrive: the time from a report with a decision to the
                 next report, beyond the usual time of an epoch of that attempt
    at_the_end   the wait at the end of a study, while other workers trained its last trials
    """

    seconds: float
    for_a_trial: float
    at_rungs: float
    at_the_end: float

    @property
    def share(self) -> float:
        return round(self.for_a_trial + self.at_rungs + self.at_the_end, 4)


def idle(connection: Connection, study_id: int, runs: bool, now: float | None = None) -> Idle | None:
    """Returns the shares over the latest LATEST attempts; None if there are none yet.

    `runs` says that the study runs, so that unfinished attempts continue until `now`.
    """
    tries = worker_queries.latest_attempts(connection, study_id, LATEST)
    if not tries:
        return None
    reports = worker_queries.epoch_reports(connection, {attempt.trial_id for attempt in tries})
    seen = [row.ended_at for row in tries if row.ended_at is not None] + [report.at for report in reports]
    last = (now or time.time()) if runs else max(seen, default=tries[-1].started_at)  # a killed attempt has no end
    ready = between = at_the_end = 0.0
    by_worker: dict[str, list[WorkedAttempt]] = defaultdict(list)
    for attempt in tries:
        by_worker[attempt.worker_id].append(attempt)
    for attempts in by_worker.values():
        gaps, busy, rest = _parts(attempts, whole=len(tries) < LATEST, last=last)
        ready += gaps + busy + rest
        between, at_the_end = (between + gaps + rest, 0.0) if runs else (between + gaps, at_the_end + rest)
    if not ready:
        return None
    shares = (round(part / ready, 4) for part in (between, _at_rungs(tries, reports, last), at_the_end))
    return Idle(round(ready, 3), *shares)


def _parts(attempts: Sequence[WorkedAttempt], *, whole: bool, last: float) -> tuple[float, float, float]:
    """Returns a worker's seconds before and between its attempts, in them, and after the last.

    Attempts that overlap count once. A worker that serves several studies, or whose first attempts are missing here,
    counts from its first attempt; a worker that has not left in good order counts to the end of its last attempt.
    """
    first = attempts[0].started_at
    begin = first if attempts[0].executor == "joined" or not whole else min(attempts[0].ready, first)
    left = attempts[0].left
    busy, covered = 0.0, begin
    for attempt in attempts:
        until = _end(attempt, last)
        busy += max(0.0, until - max(covered, attempt.started_at))
        covered = max(covered, until)
    return covered - begin - busy, busy, 0.0 if left is None else max(0.0, min(left, last) - covered)


def _end(attempt: WorkedAttempt, last: float) -> float:
    return max(last if attempt.ended_at is None else attempt.ended_at, attempt.started_at)


def _at_rungs(tries: Sequence[WorkedAttempt], reports: Sequence[EpochReport], last: float) -> float:
    """Returns the seconds from a report with a decision to the next event.

    If another epoch followed, the usual time of an epoch of the attempt is subtracted.
    """
    of_trial = {trial_id: list(rows) for trial_id, rows in groupby(reports, key=lambda report: report.trial_id)}
    waited = 0.0
    for attempt in tries:
        until = _end(attempt, last)
        within = [r for r in of_trial.get(attempt.trial_id, ()) if attempt.started_at <= r.at <= until]
        gaps = [(before.decided, after.at - before.at) for before, after in pairwise(within)]
        epochs = [gap for decided, gap in gaps if not decided]
        if within and within[-1].decided:
            waited += until - within[-1].at
        usual = statistics.median(epochs) if epochs else None
        waited += sum(max(0.0, gap - usual) for decided, gap in gaps if decided and usual is not None)
    return waited
