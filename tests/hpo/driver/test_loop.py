"""How far a study goes, how it ends, and how it is continued."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from driven import turn
from places import HARNESS
from sqlalchemy import func, select, update
from sqlalchemy.event import listen
from study_runs import drive, hpo, known, make, query, refused

from hpo.clock import FakeClock
from hpo.declaration import identity
from hpo.driver.failure_streak import MAX_UNTRAINED
from hpo.driver.loop import Driver
from hpo.driver.request import request_of
from hpo.driver.resolve import declare
from hpo.errors import DriftError
from hpo.ledger import Ledger, queries
from hpo.ledger.database.tables import asks, attempts, events, studies, trials, workers
from hpo.ledger.views import driver as driver_queries
from hpo.search.samplers.registry import SAMPLERS
from hpo.space.config import parse_override
from hpo.storage.home import Home
from hpo.storage.metrics_json import Results
from hpo.verify import rules
from hpo.verify.report import Report
from hpo.workers.executors.local import Local
from hpo.workers.worker import Worker

pytestmark = pytest.mark.whole

CURVES = str(HARNESS / "curves_study.py")
ASHA = {"reference": CURVES, "window": 4, "sampler": "tpe", "strategy": "asha"}
EPOCHS = 90

# One epoch a trial. It fails, always in the same way or in another each time, where a file stands beside it.
FRAGILE = """
import time
from pathlib import Path
from pydantic import BaseModel, ConfigDict
from hpo import Float, Objective, Study
from trainer.report import Outcome

class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    lr: float = 0.1
    pause: float = 0.0

class Fragile:
    def __init__(self, config):
        self.config = config

    def fit(self, reporter, checkpoints):
        beside = Path(__file__).parent
        if (beside / "broken").exists():
            raise ValueError("the task is broken")
        if (beside / "odd").exists():
            raise ValueError(f"odd {self.config.lr}")
        deadline = time.monotonic() + self.config.pause
        while time.monotonic() < deadline:
            if reporter.preempted:
                return Outcome("preempted")
            time.sleep(0.01)
        reporter.report(1, {"val/loss": self.config.lr}, epoch=1)
        return Outcome("complete", 1, 1)

STUDY = Study("fragile", Config(), Fragile, {"lr": Float(0.1, 1.0)}, [Objective("val/loss")], sampler="random")
"""


@pytest.fixture
def fragile(tmp_path: Path) -> Path:
    """A study file in a directory of its own."""
    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine" / "fragile.py"
    file.write_text(FRAGILE)
    return file


# Budgets


@pytest.fixture(scope="module")
def epochs_golden(tmp_path_factory) -> str:
    """The digest of a study that EPOCHS epochs end, trained in one go by one worker."""
    home = Home(tmp_path_factory.mktemp("golden"))
    digest, status, state, _ = drive(home, epochs=EPOCHS, **ASHA)
    with Ledger(home.storage).read() as connection:
        trained = [row.epoch for row in queries.trial_rows(connection, 1)]
    assert state == "complete"
    assert status.trials["pruned"] > 0, "a trial that is never cut short shows nothing"
    assert sum(trained[:-1]) < EPOCHS <= sum(trained) < EPOCHS + 9
    return digest


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(
    "workers", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_budget_of_epochs_gives_the_same_study_with_any_workers(tmp_path, epochs_golden, workers):
    digest, _, _, _ = drive(Home(tmp_path / "home"), Local(workers), epochs=EPOCHS, **ASHA)
    assert digest == epochs_golden


def test_a_budget_of_epochs_gives_the_same_study_in_parts(tmp_path, epochs_golden):
    for epochs in (1, 31, 60, EPOCHS):
        digest, _, state, _ = drive(Home(tmp_path / "home"), epochs=epochs, **ASHA)
        assert state == "complete"
    assert digest == epochs_golden


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(
    "point", ["driver.after_tell=kill@2", pytest.param("driver.before_ask_commit=kill@5", marks=pytest.mark.slow)]
)
def test_a_budget_of_epochs_gives_the_same_study_when_it_is_killed(tmp_path, epochs_golden, point):
    home = Home(tmp_path / "home")
    flags = ["--window", "4", "--sampler", "tpe", "--strategy", "asha", "--executor", "inline", "--epochs", str(EPOCHS)]
    command = [sys.executable, "-m", "hpo", "run", "--study", CURVES, *flags, "--home", str(home.root)]
    killed = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": point}
    assert subprocess.run(command, env=killed, capture_output=True, timeout=120).returncode == -signal.SIGKILL
    digest, _, state, _ = drive(home, name="curves")
    assert (digest, state) == (epochs_golden, "complete")


def test_the_first_bound_that_is_reached_ends_a_study_and_the_others_stay(tmp_path):
    home = Home(tmp_path / "home")
    _, status, state, _ = drive(home, trials=2, epochs=EPOCHS, **ASHA)
    assert (state, sum(status.trials.values())) == ("complete", 2)
    _, status, state, _ = drive(home, trials=1000, name="curves")
    assert (status.requested, status.max_epochs) == (1000, EPOCHS)
    assert state == "complete"
    assert EPOCHS <= status.epochs_trained < EPOCHS + 9


def test_used_up_time_leaves_a_study_that_goes_on_when_it_gets_more(tmp_path, fragile):
    flags = {"reference": str(fragile), "window": 2, "overrides": {"pause": 0.4}}
    golden, _, _, _ = drive(Home(tmp_path / "golden"), trials=4, **flags)
    home = Home(tmp_path / "home")
    _, status, state, reason = drive(home, trials=4, seconds=0.6, **flags)
    assert state == "interrupted"
    assert "the time of 1s is used up: `hpo resume --study fragile --time 2s` goes on" in reason
    assert status.seconds_used >= 0.6
    assert status.trials["waiting"] > 0
    assert status.trials["running"] == 0
    before = query(home, select(func.count()).select_from(attempts))
    _, again, state, reason = drive(home, name="fragile")
    assert (state, again.attempts, again.seconds_used) == ("interrupted", status.attempts, status.seconds_used)
    assert "is used up" in reason
    assert query(home, select(func.count()).select_from(attempts)) == before
    digest, status, state, reason = drive(home, name="fragile", seconds=1000.0)
    assert (digest, state, reason) == (golden, "complete", "")
    assert status.seconds_used > again.seconds_used, "time is counted over all resumptions"


@pytest.fixture
def deaf(fragile) -> Path:
    """One whose trials end in their own time, whatever they are asked."""
    fragile.write_text(FRAGILE.replace("if reporter.preempted", "if False"))
    return fragile


def test_a_trial_that_ends_when_the_time_is_over_may_be_the_studys_end(home, deaf):
    flags = {"reference": str(deaf), "overrides": {"pause": 2.0}}
    digest, status, state, reason = drive(home, trials=1, seconds=1.5, **flags)
    assert (status.trials["complete"], state, status.state, reason) == (1, "complete", "complete", "")
    with Ledger(home.storage).write() as connection:  # as a driver leaves it that is killed before it tells
        connection.execute(update(trials).values(told=None))
        connection.execute(update(studies).values(state="open"))
    again, status, state, reason = drive(home, name="fragile")
    assert (again, state, status.state, reason) == (digest, "complete", "complete", "")
    assert query(home, select(trials.c.told)) == [(0,)]


def test_time_is_counted_while_a_trial_trains_in_the_drivers_own_thread(home, fragile):
    driver = make(home, trials=1, reference=str(fragile), overrides={"pause": 600.0})
    driver.acquire()
    ran = threading.Thread(target=driver.run)
    ran.start()
    deadline = time.monotonic() + 60
    while known(home)[1].seconds_used < 1.0:
        assert time.monotonic() < deadline and ran.is_alive()
        time.sleep(0.1)
    assert known(home)[1].trials["running"] == 1
    driver.request_stop()
    ran.join(60)
    driver.release()
    assert known(home)[1].seconds_used >= 1.0


@pytest.mark.parametrize("window", [1, 4])
def test_a_study_of_which_only_paused_trials_are_left_says_so_and_ends(home, fragile, window):
    fragile.write_text(FRAGILE.replace('Outcome("complete", 1, 1)', 'Outcome("paused", 1, 1)'))
    for command in ({"trials": 3, "reference": str(fragile), "window": window}, {"name": "fragile"}):
        _, status, state, reason = drive(home, **command)
        paused = min(window, 3)
        assert (state, status.trials["paused"]) == ("interrupted", paused)
        expected = "1 trial is paused and nothing" if paused == 1 else "3 trials are paused and nothing"
        assert reason.startswith(expected)
    with Ledger(home.storage).write() as connection:
        driver_queries.thaw(connection, 1, range(3))
    fragile.write_text(FRAGILE)
    assert drive(home, name="fragile", allow_drift=True)[2] == "complete"


def test_of_trials_that_have_ended_only_the_new_ones_are_read_whole(home, fragile):
    driver = make(home, trials=40, reference=str(fragile), window=30)
    driver.acquire()
    read: list[str] = []
    listen(driver.study.ledger.engine, "after_cursor_execute", lambda *given: read.append(given[2]))
    turn(driver)
    worker = Worker(driver.study.ledger, home, "joined")
    for number in range(1, 30):  # the first one waits: all the others stay untold
        with driver.study.ledger.write() as connection:
            connection.execute(update(trials).where(trials.c.number == 0).values(state="paused"))
        assert worker.run_one([1])
        read.clear()
        turn(driver)
        turn(driver)
        assert sum("coordinates" in statement for statement in read) == 1, f"after trial {number}"
    worker.close()
    driver.release()


class Slow:
    """Workers that take a second of the driver's clock, in hundreds of its looks, before one of them trains a trial."""

    name = "slow"

    def __init__(self, home: Home, asked: list[str]) -> None:
        self._home, self._asked, self._looks = home, asked, 0
        self.codes: dict[tuple[str, int], int] = {}
        self.asked_meanwhile: list[int] = []

    def end(self, host: str, pid: int) -> None:
        """No worker of it is ever silent."""

    def start(self, context) -> None:
        self._ledger = Ledger(context.storage, create=False)
        self._worker = Worker(self._ledger, self._home, self.name)
        self._id = context.study_id

    def step(self) -> bool:
        self._looks += 1
        if self._looks % 90:
            return False
        self.asked_meanwhile.append(len(self._asked))
        trained = self._worker.run_one([self._id])
        self._asked.clear()
        return trained

    def preempt(self) -> None:
        pass

    def stop(self, grace: float) -> None:
        self._worker.close()
        self._ledger.close()


def test_a_driver_that_waits_asks_the_ledger_nothing(home, fragile):
    asked: list[str] = []
    slow = Slow(home, asked)
    driver = make(home, slow, trials=4, reference=str(fragile))
    driver._clock = FakeClock()
    driver.acquire()
    listen(driver.study.ledger.engine, "after_cursor_execute", lambda *given: asked.append(given[2]))
    assert driver.run() == "complete"
    driver.release()
    # What has ended, the asks, the lease, a look for the dead a second: not a query at each of 90 looks.
    assert len(slow.asked_meanwhile) >= 4 and max(slow.asked_meanwhile) < 45


@pytest.mark.usefixtures("process")
def test_local_workers_are_preempted_when_the_time_is_over(tmp_path, fragile):
    flags = {"reference": str(fragile), "overrides": {"pause": 600.0}, "window": 4}
    _, status, state, _ = drive(Home(tmp_path / "home"), Local(1), trials=2, seconds=8.0, **flags)
    assert state == "interrupted"
    assert status.trials["waiting"] == 2


def test_a_new_study_has_to_be_told_how_far_and_an_old_one_not(home, fragile):
    run = ("run", "--study", str(fragile), "--executor", "inline")
    bounds = "--trials, --epochs, --time, --target, --patience or --stop-when"
    assert f"say how far it is to go, by {bounds}" in refused(hpo(*run, home=home), 2)
    assert not (home.root / "logs").exists()
    drive(home, trials=2, reference=str(fragile))
    assert "--trials 1: study 'fragile' has used 2 trials already" in refused(hpo(*run, "--trials", "1", home=home), 2)
    assert drive(home, reference=str(fragile))[2] == "complete"
    lines = hpo("status", home=home).stdout.splitlines()
    assert lines[0] == "fragile: complete, 2 of 2 trials ended"
    assert re.fullmatch(r"  2 epochs trained in 2 attempts, \d+s used", lines[2])


# Failures


def stop_after(trials: int):
    def tick(driver: Driver) -> None:
        if known(driver._options.home)[1].trials["failed"] >= trials:
            driver.request_stop()

    return tick


def test_equal_failures_count_over_resumptions(tmp_path, fragile):
    home = Home(tmp_path / "home")
    (fragile.parent / "broken").touch()
    _, status, state, _ = drive(home, tick=stop_after(2), trials=9, reference=str(fragile), window=1)
    assert (state, status.trials["failed"]) == ("interrupted", 2)
    _, status, state, reason = drive(home, name="fragile")
    assert (state, status.trials["failed"]) == ("stopped", 3)
    assert reason.startswith("3 trials in a row failed in the same way:\n")
    assert "ValueError: the task is broken" in reason
    frames = [line for line in reason.splitlines() if line.startswith("  File ")]
    assert frames and all(str(fragile.parent) in frame for frame in frames)


@pytest.mark.parametrize("bound", [{"epochs": 9}, {"seconds": 600.0}])
def test_a_study_that_trials_do_not_bound_ends_where_none_trains(home, fragile, bound):
    """Each fails in another way, so that no epoch is ever used up."""
    (fragile.parent / "odd").touch()
    _, status, state, reason = drive(home, reference=str(fragile), window=1, **bound)
    assert (state, status.trials["failed"]) == ("stopped", MAX_UNTRAINED)
    assert reason.startswith("20 trials in a row ended before their first epoch, and no --trials bounds them:\n")
    assert "ValueError: odd 0." in reason
    _, status, state, _ = drive(home, name="fragile", trials=MAX_UNTRAINED + 25)
    assert (state, status.trials["failed"]) == ("stopped", MAX_UNTRAINED + 25), "who says how many is taken at the word"
    (fragile.parent / "odd").unlink()
    _, status, state, _ = drive(home, name="fragile", trials=MAX_UNTRAINED + 28)
    assert (state, status.trials["complete"]) == ("complete", 3)


def test_the_third_equal_failure_ends_the_study_as_it_comes(home, fragile):
    """With a window of five, four trials wait by then: they are not trained, and a resume begins with them."""
    (fragile.parent / "broken").touch()
    _, status, state, reason = drive(home, trials=9, reference=str(fragile), window=5)
    assert (state, reason[:40]) == ("stopped", "3 trials in a row failed in the same way")
    assert (status.trials["failed"], status.trials["waiting"], sum(status.trials.values())) == (3, 4, 7)
    assert query(home, select(func.count()).select_from(attempts)) == [(3,)]
    ledger, report = Ledger(home.storage), Report()
    assert (
        rules.check(ledger, ledger.look(lambda c: queries.study_row(c, "fragile")), report) and not report.differences
    )
    assert drive(home, name="fragile")[1].trials["failed"] == 6, "three more show that nothing was mended"
    (fragile.parent / "broken").unlink()
    _, status, state, _ = drive(home, name="fragile")
    assert (state, status.trials["failed"], status.trials["complete"]) == ("complete", 6, 3)


def test_failures_on_both_sides_of_a_trial_that_trains_are_no_row(home, fragile):
    """With one worker trial 1 would have ended before the others, and it may be complete."""
    (fragile.parent / "broken").touch()
    driver = make(home, trials=9, reference=str(fragile), window=5)
    driver.acquire()
    turn(driver)
    worker = Worker(driver.study.ledger, home, "joined")
    full: list[bool] = []
    for _ in (0, 2, 3, 4):
        with driver.study.ledger.write() as connection:  # nobody else takes it
            connection.execute(update(trials).where(trials.c.number == 1).values(state="running"))
        assert worker.run_one([1])
        full.append(turn(driver))
    assert full == [False, False, False, True], "2, 3 and 4 are three in a row, whatever becomes of 1"
    worker.close()
    driver.release()


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(("trials", "more"), [(3, " --trials 6"), pytest.param(9, "", marks=pytest.mark.slow)])
def test_a_stopped_study_goes_on_as_it_says_once_the_task_is_mended(home, fragile, trials, more):
    broken = fragile.parent / "broken"
    broken.touch()
    _, _, state, reason = drive(home, trials=trials, reference=str(fragile), window=1)
    assert state == "stopped"
    [command] = re.findall(r"`hpo (resume [^`]*)` goes on", reason)
    assert command == f"resume --study fragile{more}"
    if more:
        assert drive(home, name="fragile")[2:] == ("stopped", reason), "nothing has changed"
    broken.unlink()  # which is no part of the declaration: with that, the study would begin anew
    result = hpo(*shlex.split(command), "--executor", "inline", home=home)
    assert result.exit_code == 0, result.output
    states = known(home)[1].trials
    assert (states["failed"], states["complete"]) == (3, max(trials, 6) - 3)


@pytest.mark.usefixtures("process")
def test_a_study_without_a_value_has_failed(home, fragile):
    (fragile.parent / "odd").touch()
    run = ("run", "--study", str(fragile), "--executor", "inline", "--trials", "2")
    text = refused(hpo(*run, home=home), 5)
    at = f" --home {shlex.quote(str(home.root))}`"
    assert f"none of 2 trials gave a value, `hpo show 0 --study fragile{at} says why" in text
    assert f"correct the study, then `hpo resume --study fragile{at} starts it over" in text
    assert f"if the cause was elsewhere, `hpo resume --study fragile --trials 4{at} goes on" in text
    assert known(home)[1].state == "stopped"


# A space that has been tried

FEW = FRAGILE.replace("Float(0.1, 1.0)", "Float(0.1, 0.4, step=0.1)")
ENDS = "it ends after {} trials, as the space has 4 configurations, and each has been tried: for more, search otherwise"


def lrs(home: Home, state: str = "complete") -> list[float]:
    with Ledger(home.storage).read() as connection:
        return sorted(row.params["lr"] for row in queries.trial_rows(connection, 1) if row.state == state)


@pytest.mark.usefixtures("process")
def test_an_exhausted_space_ends_the_study_with_a_sentence(tmp_path, home, fragile):
    fragile.write_text(FEW)
    golden, _, state, reason = drive(Home(tmp_path / "golden"), trials=20, reference=str(fragile), window=2)
    assert state == "complete" and reason.startswith(ENDS.format(4))
    for total, ended in ((2, ""), (4, ""), (20, ENDS.format(4)), (None, ENDS.format(4)), (30, ENDS.format(4))):
        digest, _, state, reason = drive(home, trials=total, reference=str(fragile), window=2)
        assert state == "complete" and reason.startswith(ended) and bool(reason) == bool(ended)
    assert digest == golden and lrs(home) == [0.1, 0.2, 0.3, 0.4]
    result = hpo("resume", "--trials", "50", "--executor", "inline", home=home)
    assert result.exit_code == 0 and ENDS.format(4) in result.stdout, result.output
    assert hpo("verify", home=home).exit_code == 0, "it has fewer trials than were asked for, and says why"
    revision = query(home, select(studies.c.revision))
    drive(home, name="fragile")
    assert query(home, select(studies.c.revision)) == revision, "it is written once"


def test_what_the_user_wants_tried_twice_is_and_the_rest_once(home, fragile):
    fragile.write_text(FEW)
    twice = [{"lr": 0.2}] * 2
    _, _, state, reason = drive(home, trials=20, reference=str(fragile), enqueue=twice, sampler="grid")
    assert (state, lrs(home)) == ("complete", [0.1, 0.2, 0.2, 0.3, 0.4])
    assert reason.startswith(ENDS.format(5))


@pytest.mark.parametrize("size", [4, 2])
def test_failed_configurations_are_tried_again_once_the_task_is_mended(home, fragile, size):
    """Three equal failures, or all that there are."""
    fragile.write_text(FEW.replace("0.4, step", f"{size / 10}, step"))
    (fragile.parent / "broken").touch()
    _, status, state, reason = drive(home, trials=20, reference=str(fragile), window=1)
    assert (state, status.trials["failed"]) == ("stopped", min(size, 3))
    assert "`hpo resume --study fragile` goes on" in re.sub(r" --home \S+`", "`", reason)
    (fragile.parent / "broken").unlink()
    _, status, state, reason = drive(home, name="fragile")
    assert (state, lrs(home)) == ("complete", [0.1, 0.2, 0.3, 0.4][:size])
    assert reason.startswith(f"it ends after {size + min(size, 3)} trials")


def test_what_was_lost_is_tried_again_and_what_failed_by_itself_is_not(home, fragile):
    fragile.write_text(FEW)
    drive(home, trials=2, reference=str(fragile))
    [lost, failed] = lrs(home)
    with Ledger(home.storage).write() as connection:
        for number, (_, lr) in enumerate(query(home, select(trials.c.number, asks.c.params).join(asks))):
            outcome = "lost" if lr == {"lr": lost} else "user_error"
            connection.execute(update(trials).where(trials.c.number == number).values(state="failed", outcome=outcome))
    _, status, state, _ = drive(home, trials=20, name="fragile")
    assert (state, status.trials["failed"], lrs(home)) == ("complete", 2, sorted({0.1, 0.2, 0.3, 0.4} - {failed}))


# Continuing


def test_what_is_not_given_again_is_as_it_was_and_what_differs_is_named(home, fragile):
    run = ("run", "--study", str(fragile), "--executor", "inline", "--trials", "1")
    drive(home, trials=1, reference=str(fragile), overrides={"pause": 0.001, "lr": 0.5})
    for same in ((), ("lr=0.5",), ("pause=1e-3", "lr=0.5")):
        given = dict(parse_override(text) for text in same)
        assert drive(home, reference=str(fragile), overrides=given)[2] == "complete"
    text = refused(hpo(*run, "-o", "lr=0.25", home=home), 2)
    assert "lr changed from 0.5 to 0.25: undo the change, continue with --allow-drift, start another study with" in text
    assert f"`hpo run --study {fragile} --name NAME`" in text
    assert "pause" not in text
    fragile.write_text(FRAGILE + "changed = 1\n")
    text = refused(hpo("resume", home=home), 2)
    assert f"the code of {fragile} changed: undo the change" in text
    drive(home, trials=2, reference=str(fragile), overrides={"lr": 0.25}, allow_drift=True)
    [(fields,)] = query(home, select(events.c.fields).where(events.c.kind == "drift"))
    assert fields["changed"] == ["the code of the study changed", "lr changed from 0.5 to 0.25"]


def test_a_study_file_that_has_moved_is_the_same_study(tmp_path, home, fragile):
    drive(home, trials=1, reference=str(fragile))
    moved = fragile.rename(tmp_path / "renamed.py")
    _, status, state, _ = drive(home, trials=2, reference=str(moved), name="fragile")
    assert (state, status.trials["complete"]) == ("complete", 2)
    _, status, state, _ = drive(home, trials=3, name="fragile")
    assert (state, status.trials["complete"]) == ("complete", 3), "it is found where it lies now"


def test_a_name_that_only_the_ledger_knows_is_to_be_resumed(home, fragile):
    drive(home, trials=1, reference=str(fragile))
    text = refused(hpo("run", "--study", "fragile", "--trials", "2", home=home), 2)
    resume = f"hpo resume --study fragile --home {shlex.quote(str(home.root))}"
    assert f"a study of that name from {fragile}: `{resume}` continues it" in text
    assert "unknown study 'fragil'" in refused(hpo("run", "--study", "fragil", "--trials", "2", home=home), 2)


@pytest.mark.usefixtures("process")
def test_a_study_with_nothing_left_starts_nothing(home, fragile):
    assert hpo("run", "--study", str(fragile), "--executor", "inline", "--trials", "1", home=home).exit_code == 0

    def traces():
        rows = [*query(home, select(studies.c.revision)), *query(home, select(func.count()).select_from(workers))]
        return rows, {path.name: path.stat().st_size for path in (home.root / "logs").iterdir()}

    before = traces()
    result = hpo("resume", home=home)
    assert result.exit_code == 0, result.output
    assert "complete, 1 of 1 trial ended" in result.stdout
    assert traces() == before


def test_where_a_study_runs_is_recorded_when_it_changes(home, fragile):
    drive(home, trials=1, reference=str(fragile))
    with Ledger(home.storage).write() as connection:
        row = connection.execute(select(studies.c.environment)).scalar_one()
        connection.execute(update(studies).values(environment=row | {"host": "elsewhere"}))
    drive(home, trials=2, name="fragile")
    [(fields,)] = query(home, select(events.c.fields).where(events.c.kind == "environment"))
    assert fields == {"host": ["elsewhere", row["host"]]}
    assert query(home, select(studies.c.environment))[0][0] == row
    drive(home, trials=3, name="fragile")
    assert len(query(home, select(events.c.id))) == 1, "what has not changed is not recorded again"


def test_a_worker_with_other_code_is_refused_unless_drift_was_allowed(home, fragile):
    driver = make(home, trials=1, reference=str(fragile))
    driver.acquire()
    turn(driver)
    code = fragile.read_text()
    fragile.write_text(code + "version = 2\n")
    worker = Worker(Ledger(home.storage), home, "joined")
    with pytest.raises(
        DriftError, match=rf"this worker cannot train study 'fragile' of .*: here the code of {fragile} changed: give"
    ):
        worker.run_one([1])
    assert known(home)[1].trials["waiting"] == 1
    with Ledger(home.storage).write() as connection:
        row = connection.execute(select(studies.c.environment)).scalar_one()
        connection.execute(update(studies).values(environment=row | {"allow_drift": True}))
    assert worker.run_one([1])
    worker.close()
    assert known(home)[1].trials["complete"] == 1
    driver.release()


def test_options_of_a_sampler_are_stored_kept_and_part_of_what_a_study_is(home, fragile):
    fragile.write_text(FRAGILE.replace('sampler="random"', 'sampler={"name": "tpe", "n_startup_trials": 3}'))
    for sampler, options in (
        (None, {"n_startup_trials": 3}),
        ("tpe", {"n_startup_trials": 3}),
        ("grid", {"points": 5}),
    ):
        spec = declare(request_of(home, reference=str(fragile), sampler=sampler), None, workers=1).spec
        assert (spec.sampler, spec.sampler_options) == (sampler or "tpe", options)
    drive(home, trials=1, reference=str(fragile))
    fragile.write_text(fragile.read_text().replace(": 3}", ": 4}"))
    spec = declare(request_of(home, reference=str(fragile), sampler="tpe"), Ledger(home.storage), workers=1).spec
    assert spec.sampler_options == {"n_startup_trials": 3}, "a begun study keeps its options"
    changed = request_of(home, reference=str(fragile), sampler={"name": "tpe", "n_startup_trials": 4})
    with pytest.raises(DriftError, match=r'sampler changed from .*"n_startup_trials": 3.* to .*"n_startup_trials": 4'):
        drive(home, trials=2, reference=changed.study.reference, sampler=changed.search.sampler)


# Drift of the space

SPACES = {
    "before": '{"lr": Float(0.1, 1.0), "kind": Choice(["a", "b", "c"]), "width": Int(1, 8)}',
    "added": '{"lr": Float(0.1, 1.0), "kind": Choice(["a", "b", "c"]), "width": Int(1, 8), "wd": Float(0.0, 0.5)}',
    "removed": '{"lr": Float(0.1, 1.0), "width": Int(1, 8)}',
    "narrowed": '{"lr": Float(0.3, 0.4), "kind": Choice(["a", "b", "c"]), "width": Int(2, 8, powers_of_two=True)}',
    "an option removed": '{"lr": Float(0.1, 1.0), "kind": Choice(["c", "b"]), "width": Int(1, 8)}',
    "all of these": '{"lr": Float(0.3, 0.4), "kind": Choice(["c", "b"]), "wd": Float(0.0, 0.5)}',
}
CHANGED = [name for name in SPACES if name != "before"]
BY_DEFAULT = {(sampler, "all of these") for sampler in SAMPLERS if sampler not in ("random", "nsga3", "auto")}
BY_DEFAULT |= {("tpe", "added"), ("tpe", "narrowed")}


def with_space(space: str) -> str:
    text = FRAGILE.replace('{"lr": Float(0.1, 1.0)}', SPACES[space]).replace(
        "import Float,", "import Choice, Float, Int,"
    )
    return text.replace(
        "lr: float = 0.1", 'lr: float = 0.1\n    kind: str = "a"\n    width: int = 1\n    wd: float = 0.0'
    )


@pytest.mark.parametrize(
    ("sampler", "space"),
    [
        pytest.param(sampler, space, marks=() if (sampler, space) in BY_DEFAULT else pytest.mark.slow)
        for sampler in SAMPLERS
        for space in CHANGED
    ],
)
def test_a_study_whose_space_has_changed_goes_on_where_that_is_allowed(home, fragile, sampler, space):
    options = ', "n_startup_trials": 2' if sampler == "tpe" else ""
    declare_as = [
        with_space(name).replace('sampler="random"', f'sampler={{"name": "{sampler}"{options}}}')
        for name in ("before", space)
    ]
    fragile.write_text(declare_as[0])
    drive(home, trials=5, reference=str(fragile), window=2)
    fragile.write_text(declare_as[1])
    with pytest.raises(DriftError, match="dimension"):
        drive(home, trials=9, name="fragile")
    _, status, state, _ = drive(home, trials=8, name="fragile", allow_drift=True)
    assert (state, status.trials["complete"]) == ("complete", 8)
    _, status, state, _ = drive(home, trials=10, name="fragile")
    assert (state, status.trials["complete"]) == ("complete", 10), "what was allowed is the study now"


# What a worker that joined earlier makes of it


@pytest.fixture
def joined(home, fragile):
    """A worker that has trained a trial of a study that a driver has begun and left."""
    driver = make(home, trials=1, reference=str(fragile), window=2)
    driver.acquire()
    turn(driver)
    worker = Worker(Ledger(home.storage), home, "joined")
    assert worker.run_one([1])
    driver.release()
    return worker


def resumed(home: Home, **changes) -> None:
    """Another driver goes on with the study, one trial further, and leaves that trial waiting."""
    driver = make(home, trials=2, name="fragile", allow_drift=True, **changes)
    driver.acquire()
    turn(driver)
    driver.release()


def test_a_joined_worker_trains_the_study_as_it_is_driven_now(home, joined):
    before = joined._open(1)
    assert joined._open(1) is before
    resumed(home, window=5, strategy="median", overrides={"pause": 0.01})
    assert joined.run_one([1])
    now = joined._open(1)
    assert (now.resolved.spec.window, now.resolved.strategy.name, now.study.config.pause) == (5, "median", 0.01)
    assert known(home)[1].trials["complete"] == 2


def test_a_joined_worker_leaves_where_the_code_is_new(home, fragile, joined):
    fragile.write_text(FRAGILE + "version = 2\n")
    resumed(home)
    with pytest.raises(
        DriftError, match=r"with other code than this worker has loaded: the code of the study changed: start"
    ):
        joined.run_one([1])
    assert known(home)[1].trials["waiting"] == 1


def test_a_worker_that_reads_other_data_is_refused(tmp_path, home, fragile):
    data = tmp_path / "data.csv"
    data.write_text("1")
    text = FRAGILE.replace("lr: float = 0.1", "lr: float = 0.1\n    data: str | None = None")
    fragile.write_text(text.replace('sampler="random"', 'sampler="random", data_paths=["data"]'))
    driver = make(home, trials=1, reference=str(fragile), overrides={"data": str(data)})
    driver.acquire()
    turn(driver)
    driver.release()
    worker = Worker(Ledger(home.storage), home, "joined")
    data.write_text("2")
    with pytest.raises(DriftError, match="here the content of data changed: give it the driver's code, data and"):
        worker.run_one([1])
    data.write_text("1")
    assert worker.run_one([1])


# What no drift may change, and what is part of a study


def test_objectives_change_only_before_there_are_trials(home, fragile):
    other = FRAGILE.replace('Objective("val/loss")', 'Objective("val/loss", "maximize")')
    driver = make(home, trials=1, reference=str(fragile))
    driver.acquire()
    driver.release()
    fragile.write_text(other)
    drive(home, trials=1, reference=str(fragile), allow_drift=True)
    [(spec,)] = query(home, select(studies.c.spec))
    assert spec["objectives"] == [{"metric": "val/loss", "direction": "maximize", "select": "last"}]
    fragile.write_text(FRAGILE)
    for allow_drift in (False, True):
        with pytest.raises(
            DriftError, match=r"judged by val/loss \(maximize, last\), .* now val/loss \(minimize, last\)"
        ):
            drive(home, trials=2, name="fragile", allow_drift=allow_drift)


def test_an_objective_never_reported_is_mended_under_the_same_name(home, fragile):
    fragile.write_text(FRAGILE.replace('Objective("val/loss")', 'Objective("val/los")'))
    _, status, state, _ = drive(home, trials=2, reference=str(fragile))
    assert (state, status.trials["failed"]) == ("stopped", 2)
    [(error,)] = query(home, select(trials.c.error).where(trials.c.number == 0))
    assert error.startswith("no epoch has reported 'val/los', by which the study judges; did you mean 'val/loss'?")
    assert "Reported were val/loss: name one of them in the study, or report it with the others." in error
    fragile.write_text(FRAGILE)
    _, status, state, _ = drive(home, trials=4, name="fragile")
    assert (state, status.trials["failed"], status.trials["complete"]) == ("complete", 0, 4)


@pytest.mark.usefixtures("process")
def test_a_resume_uses_as_many_workers_as_the_run_before_unless_told(home, fragile):
    def driven(*command: str) -> list:
        assert hpo(*command, home=home).exit_code == 0
        [(environment,)] = query(home, select(studies.c.environment))
        return [environment[part] for part in ("executor", "workers")]

    run = ("run", "--study", str(fragile), "--workers", "3", "--trials")
    assert driven(*run, "1") == ["local", 3]
    assert driven("resume", "--trials", "2") == ["local", 3]
    assert driven("resume", "--trials", "3", "--executor", "inline") == ["inline", 1]


def test_the_interpreter_and_its_libraries_are_part_of_what_a_study_is(home, fragile):
    versions = identity.identity(declare(request_of(home, reference=str(fragile)), None, workers=1))["versions"]
    assert f"python {sys.version_info[0]}.{sys.version_info[1]} " in versions and "scikit-learn " in versions


@pytest.mark.usefixtures("process")
def test_ctrl_c_after_the_last_report_ends_as_an_ended_study(home, tmp_path):
    (tmp_path / "last.py").write_text(
        "import os, signal\nimport hpo\n"
        "@hpo.study(space={'lr': hpo.Float(0.1, 0.9)}, minimize='loss')\n"
        "def last(trial):\n"
        "    trial.report(1, {'loss': trial.params.lr})\n"
        "    if trial.number == 1:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
    )
    run = ("run", "--study", str(tmp_path / "last.py"), "--executor", "inline", "--trials")
    ended = hpo(*run, "2", home=home)
    assert ended.exit_code == 0, ended.output
    assert "all trials have ended, and the study with them" in ended.output and "wait for" not in ended.output
    assert "last: complete, 2 of 2 trials ended" in ended.stdout
    waits = hpo("resume", "--executor", "inline", "--trials", "3", home=home)
    assert waits.exit_code == 0, "and it can be continued as any other"


@pytest.mark.usefixtures("process")
def test_ctrl_c_while_results_are_written_leaves_a_whole_study(home, fragile, monkeypatch):
    class Interrupted(Results):
        asked = False

        def write(self) -> None:  # which may come more than once, and twice Ctrl-C ends this very process
            if not self.asked and known(home)[1].state == "complete":
                self.asked = True
                os.kill(os.getpid(), signal.SIGINT)
            super().write()

    monkeypatch.setattr("hpo.driver.run.Results", Interrupted)
    run = ("run", "--study", str(fragile), "--executor", "inline", "--trials", "1")
    result = hpo(*run, home=home)
    assert result.exit_code == 0, result.output
    assert "fragile: complete, 1 of 1 trial ended" in result.stdout and "wait for" not in result.output
    assert (home.checkpoints("fragile", 0) / "metrics.json").exists()
    result = hpo("verify", home=home)
    assert result.exit_code == 0, result.output
