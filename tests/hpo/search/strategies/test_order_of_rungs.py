"""In ordered mode a rung compares a trial with all before it, so it waits there until each has come to it or ended."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from driven import driven, turn
from places import HARNESS
from rich.console import Console
from sqlalchemy import select

from hpo.analysis.results.progress import Progress
from hpo.clock import SystemClock
from hpo.display.live import doing, screen
from hpo.driver.loop import Driver
from hpo.driver.request import DriverOptions, request_of
from hpo.driver.resolve import declare
from hpo.ledger import Ledger, queries, transactions, worker_rows
from hpo.ledger.claims import Claim, claim
from hpo.ledger.database.tables import attempts, decisions, events, reports
from hpo.ledger.process_id import Process
from hpo.storage.home import Home
from hpo.workers.executors.inline import Inline
from hpo.workers.executors.local import Local
from hpo.workers.reporter import LedgerReporter
from hpo.workers.session import StudySession
from hpo.workers.system_metrics import SystemMetrics
from hpo.workers.worker import Worker
from trainer.errors import TrainerError
from trainer.report import Outcome, Report, Verdict

pytestmark = pytest.mark.whole

CURVES = str(HARNESS / "curves_study.py")

# Trials of even `width` take ten times as long for an epoch as the others.
UNEVEN = """
import time
from pydantic import BaseModel, ConfigDict
from hpo import Float, Int, Objective, Study
from trainer.report import ENDS, Outcome

class Train(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    num_epochs: int = 9

class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    train: Train = Train()
    lr: float = 0.1
    width: int = 1

class Uneven:
    def __init__(self, config):
        self.config = config

    def fit(self, reporter, checkpoints):
        c = self.config
        for epoch in range(1, c.train.num_epochs + 1):
            if reporter.preempted:
                return Outcome("preempted", epoch - 1, epoch - 1)
            time.sleep(0.04 if c.width % 2 == 0 else 0.004)
            verdict = reporter.report(epoch, {"val/loss": c.lr + c.width / epoch}, epoch=epoch)
            if verdict.kind in ENDS:
                return Outcome(ENDS[verdict.kind], epoch, epoch)
        return Outcome("complete", epoch, epoch)

STUDY = Study(
    "uneven", Config(), Uneven, {"lr": Float(0.1, 1.0), "width": Int(1, 4)}, [Objective("val/loss")],
    strategy={"name": "asha", "min_epochs": 3}, sampler="tpe",
)
"""


class Rungs:
    """Three trials of one study, each claimed by an attempt of its own; their first rung is epoch 1."""

    def __init__(self, home: Home, claimed: int = 3, order: str = "ordered") -> None:
        self.home, self.ledger = home, Ledger(home.create().storage)
        flags: dict[str, Any] = {"reference": CURVES, "window": 4, "sampler": "random", "strategy": "asha"}
        flags["order"] = order
        resolved = declare(request_of(home, **flags), self.ledger, workers=1)
        self.driver = Driver(
            self.ledger, resolved, DriverOptions(home, self.ledger.url, home.tracking_uri, trials=3), Inline()
        )
        self.driver.acquire()
        turn(self.driver)
        self.me = Process.current()
        self.ledger.transact(lambda c: worker_rows.register(c, self.me, "inline"))
        row = self.ledger.look(lambda c: queries.study_by_id(c, 1))
        self.opened, self.leaving = StudySession(row), threading.Event()
        self.claims = self.claim(claimed)

    def close(self) -> None:
        self.driver.release()
        self.ledger.close()

    def claim(self, n: int) -> list[Claim]:
        return self.ledger.transact(lambda c: claim(c, self.me.id, uuid.uuid4().hex, [1], n))

    def reporter(self, number: int, patience: float = math.inf) -> LedgerReporter:
        asked = (self.ledger, self.home, self.opened, self.claims[number], self.leaving.is_set, SystemMetrics())
        return LedgerReporter(*asked, lambda waited: waited < patience)

    def report(self, number: int, loss: float, epoch: int = 1) -> Verdict:
        return self.reporter(number).report(Report(epoch, {"val/loss": loss}, epoch=epoch))

    def end(self, number: int, outcome: Outcome) -> None:
        self.ledger.transact(lambda c: transactions.finish(c, self.claims[number], outcome, None))

    def told(self, number: int) -> tuple[int, int]:
        """How many values and how many decisions there are of a trial."""

        def count(connection: Any) -> tuple[int, int]:
            held = select(reports).where(
                reports.c.trial_id == self.claims[number].trial_id, reports.c.key == "val/loss"
            )
            decided = select(decisions).where(decisions.c.trial_id == self.claims[number].trial_id)
            return len(connection.execute(held).all()), len(connection.execute(decided).all())

        return self.ledger.look(count)


@pytest.fixture
def rungs(tmp_path):
    made = Rungs(Home(tmp_path / "home"))
    yield made
    made.close()


class Waiting:
    """A call in a thread, which is to wait until something happens."""

    def __init__(self, call: Callable[[], Any], begun: Callable[[], bool]) -> None:
        self.answer: Any = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        deadline = time.monotonic() + 30
        while not begun() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        assert self._thread.is_alive(), f"it did not wait: {self.answer!r}"

    def _run(self) -> None:
        try:
            self.answer = self._call()
        except Exception as error:
            self.answer = error

    def end(self) -> Any:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.answer


def waits(rungs: Rungs, number: int, loss: float) -> Waiting:
    return Waiting(lambda: rungs.report(number, loss), lambda: rungs.told(number)[0] == 1)


def test_a_trial_is_held_against_all_before_it_whoever_comes_first(rungs):
    last = waits(rungs, 2, 2.5)
    assert rungs.told(2) == (1, 0), "its value stands while it waits, undecided"
    middle = waits(rungs, 1, 2.0)
    assert rungs.report(0, 1.0) == Verdict("continue", 1)
    assert middle.end().reason == "rank 2 of 2 at rung 0 (epoch 1); only the best goes on"
    assert last.end().reason == "rank 3 of 3 at rung 0 (epoch 1); only the best goes on"


def test_what_waits_at_a_rung_is_shown(rungs):
    """Else a run that stands still looks like one that trains."""
    progress = Progress(rungs.ledger, rungs.opened.name, SystemClock())
    late = waits(rungs, 2, 0.5)
    progress.refresh()
    assert progress.at_rung == {2}
    assert doing(progress) == "3 trials running, 1 of them at a rung until earlier ones come there"
    console = Console(width=100, force_terminal=False)
    with console.capture() as shown:
        console.print(screen(progress, "", 100, 20))
    assert ["at rung" in line for line in shown.get().splitlines()[-3:]] == [False, False, True]
    rungs.report(0, 1.0)
    rungs.end(1, Outcome("user_error", error="it has ended"))
    assert late.end().kind == "continue"
    progress.refresh()
    assert progress.at_rung == set(), "what it was told is what it trains by"


def test_nothing_waits_at_a_rung_that_compares_with_earlier_comers(tmp_path):
    free = Rungs(Home(tmp_path / "home"), order="async")
    assert free.report(2, 0.5).kind == "continue"
    assert Progress(free.ledger, free.opened.name, SystemClock()).at_rung == set()
    free.close()


@pytest.mark.parametrize("epoch", [None, 3])
def test_one_that_trains_is_not_said_to_wait(rungs, epoch):
    """Neither between two epochs, nor after one that nothing is decided on."""
    rungs.report(0, 1.0)
    rungs.report(1, 0.5)
    rungs.report(1, 0.5, epoch=2)
    rungs.reporter(1).report(Report(3, {"val/other": 0.5}, epoch=epoch))
    assert Progress(rungs.ledger, rungs.opened.name, SystemClock()).at_rung == set()


def test_what_comes_after_a_trial_is_nothing_to_it(rungs):
    late = waits(rungs, 2, 0.5)
    assert rungs.report(0, 1.0).kind == "continue"
    assert rungs.report(1, 0.9).kind == "continue", "trial 2 is ahead of it, and came first"
    assert late.end().kind == "continue"


@pytest.mark.parametrize("kind", ["user_error", "nonfinite"])
def test_one_that_ends_below_the_rung_is_waited_for_no_longer(rungs, kind):
    second = waits(rungs, 1, 2.0)
    rungs.end(0, Outcome(kind, error="it has ended"))
    assert second.end() == Verdict("continue", 1)


def test_it_makes_way_for_one_that_has_lost_its_worker(rungs):
    """Else workers that all wait would wait for ever for a trial that none of them can take."""
    second = waits(rungs, 1, 2.0)
    rungs.ledger.transact(lambda c: transactions.lose(c, rungs.claims[0].trial_id, rungs.claims[0].fence, "killed"))
    assert second.end() == Verdict("leave", 1)
    rungs.end(1, Outcome("preempted"))
    again, _ = rungs.claims[:2] = rungs.claim(2)
    assert again.number == 0
    replayed = Waiting(lambda: rungs.report(1, 2.0), lambda: True)
    assert rungs.report(0, 1.0).kind == "continue"
    assert replayed.end().kind == "stop", "what it is told is what it would have been"


def test_an_attempt_that_is_to_leave_does_not_wait_on(rungs):
    second = waits(rungs, 1, 2.0)
    rungs.leaving.set()
    assert second.end() == Verdict("leave", 1)


@pytest.mark.parametrize("made_of_it", [Outcome("complete", 9, 9), Outcome("user_error", error="of another kind")])
def test_where_waiting_comes_to_nothing_it_ends_in_any_loop(rungs, made_of_it):
    """As inline, where the driver does nothing meanwhile, and where the driver of a joined worker is gone."""
    reporter = rungs.reporter(1, patience=0.1)
    assert reporter.report(Report(1, {"val/loss": 2.0}, epoch=1)) == Verdict("leave", 1)
    with pytest.raises(TrainerError, match="told to leave at step 1 and reported step 2"):
        reporter.report(Report(2, {"val/loss": 1.0}, epoch=2))
    assert reporter.obeyed(made_of_it) == Outcome("preempted", step=1)
    [fields] = rungs.ledger.look(
        lambda c: c.execute(select(events.c.fields).where(events.c.kind == "leave_ignored")).scalars()
    )
    assert fields == {"step": 1, "ended": made_of_it.kind, "error": made_of_it.error}, "nothing is swallowed"
    assert rungs.told(1) == (1, 0), "nothing beyond the rung, which is undecided"


def test_a_worker_asks_whether_waiting_in_that_study_comes_to_anything(tmp_path):
    """One that joined several studies leaves a rung whose own driver is gone."""
    rungs, asked = Rungs(Home(tmp_path / "home"), claimed=1), []
    worker = Worker(
        rungs.ledger, rungs.home, "joined", worth_while=lambda study, waited: not asked.append(study) and waited < 0.1
    )
    assert worker.run_one([1])
    worker.close()
    rows = rungs.ledger.look(lambda c: c.execute(select(attempts.c.trial_id, attempts.c.outcome)).all())
    rungs.close()
    assert rows == [(1, None), (2, "preempted")] and set(asked) == {1}


def test_one_that_is_paused_is_waited_for_no_longer(rungs):
    """It goes on in no given time: it was left by a strategy that lets trials pause."""
    second = waits(rungs, 1, 2.0)
    rungs.end(0, Outcome("paused"))
    assert second.end() == Verdict("continue", 1)


@pytest.mark.usefixtures("process")
def test_uneven_trials_end_as_one_after_another(tmp_path):
    """Three workers whose trials differ tenfold in speed give the digest of one, which waits for nothing."""
    path = tmp_path / "uneven.py"
    path.write_text(UNEVEN)

    def drive(home: Home, executor: Any) -> tuple[str, queries.Status, int]:
        ledger = Ledger(home.create().storage)
        name, state = driven(ledger, request_of(home, reference=str(path), window=12), executor, trials=30)
        assert state == "complete"
        with ledger.read() as connection:
            row = queries.study_row(connection, name)
            found = queries.digest(connection, row), queries.status(connection, name)
            compared = (
                connection.execute(select(decisions.c.reason).where(decisions.c.verdict == "stop")).scalars().all()
            )
            lost = connection.execute(select(attempts).where(attempts.c.outcome != "complete")).all()
        assert len({one.trial_id for one in lost}) == found[1].trials["pruned"], "none had to make way"
        ledger.close()
        return *found, max(int(reason.split(" of ")[1].split()[0]) for reason in compared)

    golden, status, most = drive(Home(tmp_path / "inline"), Inline())
    digest, same, _ = drive(Home(tmp_path / "local"), Local(3))
    assert digest == golden
    assert same.trials == status.trials and status.trials["pruned"] > 5
    assert most > 30 - 12 + 1, "those within the window count, which had not ended when it was asked for"
