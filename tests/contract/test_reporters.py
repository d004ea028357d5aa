"""What every reporter must do, over all attempts at one trial: the ledger's, alone, led by several ranks and in a loop
of the task's own, and the one in memory by which the trainer's own tests judge it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from made_rows import study_row
from mirrored import Made
from sqlalchemy import select
from trainer_runs import MemoryReporter

from hpo.ledger import transactions
from hpo.ledger.database import tables
from hpo.ledger.history import Curves
from hpo.space.objective import Objective
from hpo.storage import artifacts as stored
from hpo.storage.home import Home
from hpo.workers.reporter import LedgerReporter
from hpo.workers.system_metrics import SystemMetrics
from trainer.distributed.group import _Reporter as LedReporter
from trainer.errors import Fenced, TrainerError
from trainer.report import CONTINUE, LoopReporter, Report, Reporter, Verdict

STOP = Verdict("stop", 2, "as the test wants it")


class StopAtTwo:
    """Stops the trial at epoch 2, the first time it is asked; then it would not."""

    name = "test"

    def __init__(self) -> None:
        self.asked = 0

    def wants(self, epoch: int) -> bool:
        return True

    def decide(self, history: Any) -> Verdict:
        self.asked += history.epoch == 2
        return STOP if history.epoch == 2 and self.asked == 1 else CONTINUE


@dataclass
class Attempts:
    """One trial: `next` takes it from the attempt before and gives the next one's reporter."""

    next: Callable[[], Reporter]
    values: Callable[[], dict[tuple[int, str], float]]
    events: Callable[[str], list[dict[str, Any]]]
    artifacts: Callable[[], dict[str, str]]
    fences: bool = True


def in_ledger(home: Home, wrap: Callable[[Reporter], Reporter]) -> tuple[Attempts, Made]:
    made, strategy, taken = Made(home), StopAtTwo(), []
    made.ask()
    opened: Any = SimpleNamespace(
        name=made.name,
        row=study_row(),
        resolved=SimpleNamespace(strategy=strategy, decide=strategy.decide),
        study=SimpleNamespace(trains_itself=False),
        curves=Curves(made.id, [Objective("val/loss")]),
        history=lambda connection, claim, epoch: SimpleNamespace(epoch=epoch, told=True),
    )

    def begin() -> Reporter:
        if taken:
            made.ledger.transact(lambda c: transactions.lose(c, taken[-1].trial_id, taken[-1].fence, "test"))
        taken.append(made.claim())
        return wrap(LedgerReporter(made.ledger, home, opened, taken[-1], lambda: False, SystemMetrics()))

    def events(kind: str) -> list[dict[str, Any]]:
        query = select(tables.events.c.fields).where(tables.events.c.kind == kind).order_by(tables.events.c.id)
        return list(made.ledger.look(lambda c: c.execute(query).scalars().all()))

    def values() -> dict[tuple[int, str], float]:
        r = tables.reports.c
        rows = made.ledger.look(lambda c: c.execute(select(r.step, r.key, r.value)).all())
        return {(step, key): math.nan if value is None else value for step, key, value in rows if key[:4] == "val/"}

    def artifacts() -> dict[str, str]:
        shown = made.ledger.look(lambda c: stored.artifacts(c, taken[-1].trial_id))
        return {name: (home.files(made.name, 0) / stored).read_text() for name, stored in shown.items()}

    return Attempts(begin, values, events, artifacts), made


def in_memory() -> Attempts:
    strategy = StopAtTwo()
    reporter = MemoryReporter(lambda step, metrics, epoch: strategy.decide(SimpleNamespace(epoch=epoch)))
    return Attempts(
        lambda: reporter,
        lambda: reporter.values,
        lambda kind: [fields for one, fields in reporter.events if one == kind],
        lambda: dict(reporter.artifacts),
        fences=False,  # its attempts are one after another in one process
    )


def led(reporter: Reporter) -> Reporter:
    """As rank 0 of a trial whose other ranks hear what it agrees to."""
    ranks: Any = SimpleNamespace(first=True, agree=lambda value: value)
    return LedReporter(reporter, ranks)


WRAPS: dict[str, Callable[[Reporter], Reporter]] = {
    "ledger": lambda reporter: reporter,
    "lead": led,
    "loop": LoopReporter,
}


@pytest.fixture(params=[*WRAPS, "memory"])
def trial(request, home) -> Iterator[Attempts]:
    if request.param == "memory":
        yield in_memory()
        return
    attempts, made = in_ledger(home, WRAPS[request.param])
    yield attempts
    made.ledger.close()


def test_a_replay_gets_the_verdict_that_was_stored(trial):
    first = trial.next()
    assert first.preempted is False
    assert first.report(Report(1, {"val/loss": 3.0}, epoch=1)).kind == "continue"
    verdict = first.report(Report(2, {"val/loss": 2.0}, epoch=2))
    assert (verdict.kind, verdict.step, verdict.reason) == ("stop", 2, STOP.reason)
    again = trial.next()
    assert again.report(Report(1, {"val/loss": 3.0}, epoch=1)).kind == "continue"
    assert again.report(Report(2, {"val/loss": 2.0}, epoch=2)) == verdict
    assert trial.values() == {(1, "val/loss"): 3.0, (2, "val/loss"): 2.0}


@pytest.mark.parametrize("trial", ["ledger", "lead"], indirect=True)
def test_a_loop_that_trains_on_after_it_was_told_to_end_is_in_error(trial):
    reporter = trial.next()
    assert reporter.report(Report(2, {"val/loss": 2.0}, epoch=2)).kind == "stop"
    assert reporter.report(Report(2, {})).kind == "continue"  # what it saves on its way out
    with pytest.raises(TrainerError, match=r"told to stop at step 2 and reported step 3: fit\(\) has to return"):
        reporter.report(Report(3, {"val/loss": 1.0}, epoch=3))
    assert trial.values() == {(2, "val/loss"): 2.0}


def test_a_report_without_an_epoch_or_without_metrics_goes_on(trial):
    reporter = trial.next()
    assert reporter.report(Report(1, {"val/loss": math.nan})).kind == "continue"
    assert reporter.report(Report(2, {})).kind == "continue"
    assert [repr(value) for value in trial.values().values()] == ["nan"]


def test_the_first_value_stands(trial):
    trial.next().report(Report(1, {"val/loss": 1.0}, epoch=1))
    reporter = trial.next()
    if trial.fences:
        reporter.report(Report(1, {"val/loss": 9.0, "val/late": 5.0}, epoch=1))
        assert len(trial.events("replay_differs")) == 1
        assert trial.values() == {(1, "val/loss"): 1.0, (1, "val/late"): 5.0}
    else:  # for the trainer's own tests a replay that differs is the failure they look for
        with pytest.raises(AssertionError, match=r"was 1\.0 and is 9\.0 in a replay"):
            reporter.report(Report(1, {"val/loss": 9.0}, epoch=1))
        assert trial.values() == {(1, "val/loss"): 1.0}


def test_an_event_with_a_step_is_recorded_once(trial):
    for _ in range(2):
        reporter = trial.next()
        reporter.event("skipped_step", step=4, why="not finite")
        reporter.event("noted")
    assert trial.events("skipped_step") == [{"step": 4, "why": "not finite"}]
    assert len(trial.events("noted")) == 2


def test_of_several_artifacts_of_a_name_the_last_is_shown(trial, tmp_path):
    note = tmp_path / "note.txt"
    for text in ("draft", "final"):
        reporter = trial.next()
        note.write_text(text)
        reporter.artifact(note)
        reporter.artifact(note, "plots/a.txt")
    assert trial.artifacts() == {"note.txt": "final", "plots/a.txt": "final"}


@pytest.mark.parametrize("trial", [*WRAPS], indirect=True)  # one in memory has one attempt at a time
def test_what_was_taken_from_an_attempt_it_can_write_no_more(trial, tmp_path):
    old, _ = trial.next(), trial.next()
    note = tmp_path / "note.txt"
    note.write_text("late")
    for write in (
        lambda: old.report(Report(1, {"val/loss": 1.0}, epoch=1)),
        lambda: old.event("late"),
        lambda: old.artifact(note),
    ):
        with pytest.raises(Fenced):
            write()
    assert (trial.values(), trial.events("late"), trial.artifacts()) == ({}, [], {})


@pytest.mark.parametrize("trial", ["loop"], indirect=True)
def test_a_loop_reports_by_parts_or_by_a_report(trial):
    reporter = trial.next()
    assert reporter.report(1, {"val/loss": 3.0}, epoch=1).kind == "continue"
    assert reporter.report(Report(2, {"val/loss": 2.0}, epoch=2)).kind == "stop"
    assert (reporter.step, reporter.epoch, reporter.kind) == (2, 2, "pruned")
    assert trial.values() == {(1, "val/loss"): 3.0, (2, "val/loss"): 2.0}
