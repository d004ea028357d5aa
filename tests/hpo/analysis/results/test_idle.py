"""How much workers have waited, on times written by hand."""

from __future__ import annotations

import pytest
from crafted import open_crafted, put_trial
from sqlalchemy import insert, update

from hpo.analysis.results.idle import Idle, idle
from hpo.analysis.results.status import waiting
from hpo.ledger import Ledger
from hpo.ledger.database import tables


def worker(ledger: Ledger, name: str, ready: float, left: float | None, executor: str = "local") -> None:
    row = {"id": name, "host": "box", "pid": 1, "pid_started": name, "slots": 1, "executor": executor}
    with ledger.write() as connection:
        connection.execute(insert(tables.workers).values(row | {"started_at": ready, "ended_at": left}))


def tried(
    ledger: Ledger, number: int, who: str, begin: float, end: float | None, epochs: tuple[float, ...], rung: int = 0
) -> None:
    """A trial with one attempt, whose epochs were reported at those times; the `rung`-th was decided on."""
    trial = put_trial(ledger, number, "complete", tuple(0.1 for _ in epochs))
    with ledger.write() as connection:
        mine = tables.attempts.c.trial_id == trial
        times = {"worker_id": who, "started_at": begin, "ended_at": end}
        connection.execute(update(tables.attempts).where(mine).values(times))
        for epoch, at in enumerate(epochs, start=1):
            where = (tables.reports.c.trial_id == trial) & (tables.reports.c.epoch == epoch)
            connection.execute(update(tables.reports).where(where).values(at=at))
        if rung:
            row = {"trial_id": trial, "step": 10 * rung, "fold": 0, "verdict": "continue", "reason": "", "params": {}}
            connection.execute(insert(tables.decisions).values(row | {"strategy": "asha", "fence": 1, "revision": 1}))


@pytest.fixture
def ledger(tmp_path):
    opened = open_crafted(tmp_path / "ledger.db")
    yield opened
    opened.close()


def found(ledger: Ledger, runs: bool = False, now: float | None = None) -> Idle | None:
    with ledger.read() as connection:
        return idle(connection, 1, runs, now)


def test_a_study_without_attempts_has_waited_for_nothing(ledger):
    assert found(ledger) is None


def test_gaps_between_attempts_and_waits_at_rungs_are_told_apart(ledger):
    worker(ledger, "a", ready=0.0, left=100.0)
    worker(ledger, "b", ready=10.0, left=None)  # killed at 90
    worker(ledger, "c", ready=0.0, left=500.0, executor="joined")
    tried(ledger, 0, "a", 5.0, 45.0, (10.0, 20.0, 40.0, 45.0), rung=2)  # 20 s after the rung, where an epoch takes 7.5
    tried(ledger, 1, "a", 50.0, 100.0, (60.0, 100.0))
    tried(ledger, 2, "b", 10.0, 90.0, (20.0, 70.0), rung=2)  # told to stop 20 s after it came to the rung
    tried(ledger, 3, "c", 30.0, 60.0, (60.0,))
    waited = found(ledger)
    assert waited is not None
    assert waited.seconds == 100.0 + 80.0 + (100.0 - 30.0)
    assert waited.for_a_trial == pytest.approx((5.0 + 5.0) / 250.0, abs=1e-4)
    assert waited.at_the_end == pytest.approx(40.0 / 250.0, abs=1e-4)
    assert waited.at_rungs == pytest.approx((20.0 - 7.5 + 20.0) / 250.0, abs=1e-4)
    assert waiting(waited) == (
        "workers idle for 33.0% of 4m10s: 4.0% waiting for a new trial, 13.0% at rungs for earlier trials, 16.0% at "
        "the end for the last trials"
    )


def test_what_was_killed_counts_up_to_the_last_report_of_any(ledger):
    worker(ledger, "a", ready=0.0, left=None)
    worker(ledger, "b", ready=5.0, left=None)
    tried(ledger, 0, "a", 2.0, 12.0, (12.0,))
    tried(ledger, 1, "a", 12.0, None, (32.0, 52.0))
    tried(ledger, 2, "b", 5.0, None, (45.0,))
    waited = found(ledger)
    assert waited is not None and waited.seconds == 52.0 + 47.0
    assert waited.for_a_trial == pytest.approx(2.0 / 99.0, abs=1e-4) and waited.at_the_end == 0.0


def test_lanes_that_overlap_count_once_and_what_runs_goes_on_now(ledger):
    worker(ledger, "a", ready=0.0, left=None)
    tried(ledger, 0, "a", 0.0, 30.0, (30.0,))
    tried(ledger, 1, "a", 0.0, 20.0, (20.0,))
    tried(ledger, 2, "a", 40.0, None, (50.0,))
    assert found(ledger, runs=True, now=80.0) == Idle(80.0, 0.125, 0.0, 0.0)
