"""The end phase: after a search, stopped trials that stood better than the best are trained to their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from places import HARNESS
from sqlalchemy import update
from sqlalchemy.engine import Connection
from study_runs import digest, hpo, refused, studies

import hpo as door
from hpo.analysis.follow_up import finish
from hpo.analysis.report import data
from hpo.analysis.results.progress import Progress
from hpo.clock import SystemClock
from hpo.display import watch
from hpo.display.summary import summary
from hpo.driver.request import RunResult
from hpo.ledger import Ledger, queries
from hpo.ledger.database.tables import attempts
from hpo.ledger.database.tables import studies as studies_table
from hpo.storage.home import Home
from hpo.tracking import mirror_process
from hpo.tracking.uri import tracker_name
from hpo.verify import verify

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

CROSSING = """
import os
import signal
from pathlib import Path

import hpo

QUEUE = [{"begin": 0.1, "end": 0.9}, {"begin": 0.5, "end": 0.2}, {"begin": 0.7, "end": 0.1}]
SPACE = {"begin": hpo.Float(0.0, 1.0), "end": hpo.Float(0.0, 1.0)}
MARK = Path(__file__).with_name("mark")

@hpo.study(space=SPACE, minimize="loss", num_epochs=6, enqueue=QUEUE)
def crossing(trial):
    for epoch in range(1, 7):
        loss = trial.params.begin + (trial.params.end - trial.params.begin) * epoch / 6
        if epoch == 4 and trial.params.begin == 0.5 and MARK.exists():
            what = MARK.read_text()
            if what == "fail":
                raise RuntimeError("no luck")
            MARK.unlink()
            os.kill(os.getpid(), signal.SIGINT)
        if trial.report(epoch, {"loss": loss}):
            return
"""
TINY = str(HARNESS / "tiny_study.py")
SEARCH = ("--executor", "inline", "--window", "1", "--strategy", "asha", "--sampler", "random")
AFTER = "trained to epoch 6 after it was stopped at epoch 2 (study crossing-finish, trial 0)"


@pytest.fixture
def file(tmp_path) -> Path:
    """A study whose trial 0 leads at the rung and ends at 0.9; the two others are stopped with 0.4 and 0.5 there, and
    end at 0.2 and 0.1."""
    path = tmp_path / "crossing.py"
    path.write_text(CROSSING)
    return path


def run(home: Home, file: Path, *flags: str, trials: int = 3):
    result = hpo("run", "--study", str(file), "--trials", str(trials), *SEARCH, *flags, home=home)
    assert result.exit_code == 0, result.output
    return result


def best(home: Home) -> tuple[int, float]:
    answer = door.open("crossing", home=home.root).best
    return answer["number"], answer["value"]


def test_each_place_has_the_stopped_trial_that_was_finished(tmp_path, file):
    home = Home(tmp_path / "home")
    ran = run(home, file)
    assert (
        "trial 1 begins again to epoch 6: it keeps no checkpoint to go on from; ahead of the best when it" in ran.output
    )
    assert f"best: trial 1, loss 0.2\n  {AFTER}" in ran.output
    assert "ahead of the best when it stopped: trial" not in ran.output
    assert best(home) == (1, pytest.approx(0.2))
    assert f"crossing, trial 1: loss 0.2\n  {AFTER}" in hpo("best", "--study", "crossing", home=home).stdout
    assert f"best: trial 1, 0.2, {AFTER}" in hpo("status", "--study", "crossing", home=home).stdout
    table = door.open("crossing", home=home.root).trials()
    assert [*table["value"]] == pytest.approx([0.9, 0.2, 0.5]) and [*table["state"]] == ["complete", "pruned", "pruned"]
    assert table["finished"].dropna().to_dict() == {1: "crossing-finish/0"}
    with closing(Ledger(home.storage)) as ledger:
        report = data.read(ledger, home, "crossing")
    assert [one["number"] for one in report.answer["best"]] == [1] and report.answer["stopped_ahead"] == ""
    assert verify(home, home.storage).differences == []


def test_a_search_that_is_extended_is_the_one_without_an_end_phase(tmp_path, file):
    parts, once = Home(tmp_path / "parts"), Home(tmp_path / "once")
    run(parts, file)
    run(parts, file, trials=6)
    run(once, file, "--finish", "none", trials=6)
    assert digest(parts, "crossing") == digest(once, "crossing")
    assert studies(once) == ["crossing"] and studies(parts) == ["crossing", "crossing-finish"]
    again = run(parts, file, trials=6)
    assert "begins again" not in again.output


def test_killed_and_resumed_it_has_the_same_answer(tmp_path, file):
    """The search reports ten times; the twelfth is of the end phase."""
    alone, killed = Home(tmp_path / "alone"), Home(tmp_path / "killed")
    run(alone, file)
    environ = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": "worker.after_report_commit=kill@12"}
    line = [sys.executable, "-m", "hpo", "run", "--study", str(file), "--trials", "3", *SEARCH, "--home"]
    done = subprocess.run([*line, str(killed.root)], env=environ, capture_output=True, timeout=240)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert studies(killed) == ["crossing", "crossing-finish"] and best(killed) == (0, pytest.approx(0.9))
    resumed = hpo("resume", "--study", "crossing", home=killed)
    assert resumed.exit_code == 0, resumed.output
    assert "trial 1 goes on to its end in study crossing-finish" in resumed.output
    assert best(killed) == best(alone) == (1, pytest.approx(0.2))
    for study in ("crossing", "crossing-finish"):
        assert digest(killed, study) == digest(alone, study)
    assert verify(killed, killed.storage).differences == []


def test_ctrl_c_leaves_a_study_that_goes_on(tmp_path, file):
    home = Home(tmp_path / "home")
    file.with_name("mark").write_text("interrupt")
    line = [sys.executable, "-m", "hpo", "run", "--study", str(file), "--trials", "3", *SEARCH, "--home"]
    done = subprocess.run([*line, str(home.root)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 130, done.stderr
    assert "crossing: interrupted, 3 of 3 trials ended" in done.stdout and "hpo resume --study crossing" in done.stdout
    assert best(home) == (0, pytest.approx(0.9))
    resumes = f"`hpo resume --study crossing --home {home.root}`"
    assert f"stopping: trials are saved and wait for {resumes}" in done.stdout + done.stderr
    advised = hpo("best", "--study", "crossing", home=home).stdout
    assert f"{resumes} goes on with its training to the end, which was interrupted" in advised
    assert "hpo extend" not in advised
    status = hpo("status", "--study", "crossing-finish", home=home).stdout
    assert resumes.strip("`") in status and "resume --study crossing-finish" not in status
    assert hpo("resume", "--study", "crossing", home=home).exit_code == 0
    assert best(home) == (1, pytest.approx(0.2))


def test_a_trial_that_fails_leaves_the_answer_and_is_not_tried_again(tmp_path, file):
    home = Home(tmp_path / "home")
    file.with_name("mark").write_text("fail")
    ran = run(home, file)
    assert "none of 1 trial gave a value" in ran.output
    assert best(home) == (2, pytest.approx(0.1)), "the next one ahead has its turn"
    assert "trial 1 begins" in ran.output and "trial 1 begins" not in run(home, file).output


def test_none_leaves_it_out_and_the_study_keeps_that(tmp_path, file, monkeypatch):
    home = Home(tmp_path / "home")
    ran = run(home, file, "--finish", "none")
    assert "ahead of the best when it stopped: trial 1, loss 0.4 at epoch 2" in ran.output
    run(home, file)
    assert studies(home) == ["crossing"] and best(home) == (0, pytest.approx(0.9))
    with closing(Ledger(home.storage)) as ledger:
        for value in ("auto", "none"):  # of a study that has ended, whose phase is not begun here
            monkeypatch.setattr(watch, "end_phase", lambda request, searched, console, run: searched)
            assert hpo("resume", "--study", "crossing", "--finish", value, home=home).exit_code == 0
            kept = ledger.look(lambda connection: queries.study_row(connection, "crossing").spec.json["finish"])
            assert kept == value
    monkeypatch.undo()
    assert hpo("resume", "--study", "crossing", "--finish", "auto", home=home).exit_code == 0
    assert best(home) == (1, pytest.approx(0.2))
    assert AFTER in hpo("show", "1", "--study", "crossing", home=home).stdout
    error = refused(hpo("run", "--study", str(file), "--trials", "1", "--finish", "all", home=home), 2)
    assert "--finish 'all'" in error or "finish 'all'" in error


def test_an_extension_by_hand_counts_alike_and_a_longer_one_stands_beside(tmp_path, file):
    home = Home(tmp_path / "home")
    run(home, file, "--finish", "none")
    longer = hpo("extend", "2", "--study", "crossing", "-o", "train.num_epochs=7", "--executor", "inline", home=home)
    assert longer.exit_code == 0, longer.output
    assert best(home) == (0, pytest.approx(0.9))
    assert hpo("extend", "1", "--study", "crossing", "--executor", "inline", home=home).exit_code == 0
    assert best(home) == (1, pytest.approx(0.2))
    said = hpo("best", "--study", "crossing", home=home).stdout
    assert "(study crossing-extend, trial 1)" in said and "extended: trial 2 to epoch 6, loss 0.1" in said
    judged = "trial 1 was pruned, and then trained to epoch 6 (study crossing-extend, trial 1), by which it is judged"
    assert judged in hpo("compare", "--study", "crossing", home=home).stdout
    sets = ("-o", "train.num_epochs=8", "-o", "end=0.3")
    told = hpo("extend", "1", "--study", "crossing", *sets, "--executor", "inline", home=home)
    assert "trial 1 begins again to epoch 8: " in told.stderr and "; it also takes end=0.3 (was 0.2)\n" in told.stderr
    assert hpo("rm", "2", "--study", "crossing", "--yes", home=home).exit_code == 0
    assert "extended: trial 2" not in hpo("best", "--study", "crossing", home=home).stdout
    error = refused(hpo("extend", "2", "--study", "crossing", home=home), 2)
    gone = "trial 2 of study 'crossing' is removed: "
    assert f"{gone}its checkpoints are gone, so extend another" in error
    shown = hpo("show", "2", home=home).stdout
    assert "removed by `hpo rm`: its checkpoints, files and runs are gone, and only `hpo show` shows it" in shown
    assert f"{gone}nothing shows its tags any more" in refused(hpo("tag", "2", "good=1", home=home), 2)
    assert f"{gone}its checkpoints are gone" in refused(
        hpo("export", "2", "--to", str(tmp_path / "m.pt2"), home=home), 2
    )


def test_a_phase_of_a_deleted_study_of_the_name_is_not_taken(tmp_path, file):
    home = Home(tmp_path / "home")
    run(home, file)
    assert hpo("rm", "--study", "crossing", "--yes", home=home).exit_code == 0
    again = run(home, file)
    assert "study 'crossing-finish' belongs to an earlier study 'crossing'" in again.output
    assert best(home) == (0, pytest.approx(0.9))
    said = hpo("best", "--study", "crossing", home=home).stdout
    assert "extended:" not in said and "ahead of the best when it stopped: trial 1, loss 0.4" in said
    assert hpo("rm", "--study", "crossing-finish", "--yes", home=home).exit_code == 0
    run(home, file)
    assert best(home) == (1, pytest.approx(0.2))


def test_budgets_of_epochs_and_time_bound_it(tmp_path, file):
    """Ten epochs are searched; a tenth of them is one trial, which may exceed the budget, and no second one."""
    home = Home(tmp_path / "home")
    ran = hpo("run", "--study", str(file), "--epochs", "10", *SEARCH, home=home)
    assert ran.exit_code == 0, ran.output
    assert studies(home) == ["crossing", "crossing-finish"]
    with closing(Ledger(home.storage)) as ledger, ledger.read() as connection:
        assert queries.study_row(connection, "crossing-finish").requested == 1


def test_the_mirror_of_the_search_sends_the_phase_too(tmp_path, file, monkeypatch):
    """One mirror starts in a run with a phase, and MLflow has what both have trained."""
    started: list[str] = []
    spawn = mirror_process.spawn
    monkeypatch.setattr(mirror_process, "spawn", lambda *at: started.append(at[-1]) or spawn(*at))
    home = Home(tmp_path / "home")
    run(home, file)
    assert started == ["crossing"] and studies(home) == ["crossing", "crossing-finish"]
    with closing(Ledger(home.storage)) as ledger:
        name = tracker_name(home.tracking_uri)
        assert {study: mirror_process.behind(ledger, name, study) for study in studies(home)} == {
            "crossing": 0,
            "crossing-finish": 0,
        }
    assert verify(home, home.storage).differences == []


def test_a_run_whose_time_is_used_up_says_what_stands_ahead(tmp_path, file):
    home = Home(tmp_path / "home")
    run(home, file, "--finish", "none")
    with closing(Ledger(home.storage)) as ledger:
        progress = Progress(ledger, "crossing", SystemClock())
        late = summary(progress, RunResult("crossing", "interrupted", "the time of 1m is used up", 0, None), 60.0)
        complete = summary(progress, RunResult("crossing", "complete", "", 0, None), 60.0)
    for said in (late, complete):
        assert "ahead of the best when it stopped: trial 1, loss 0.4 at epoch 2" in said and "extend 1 --study" in said
    why = "the end phase does so by itself once the search is complete or, where time alone bounds it"
    assert why in late and why not in complete


def test_from_its_checkpoint_it_ends_as_if_it_had_not_been_stopped(tmp_path):
    """Oracle: the same configuration under no strategy. The threshold stops the best trial at a loss below it."""
    settings = {"pause": 0, "train.early_stopping.patience": 99, "train.num_epochs": 5}
    asked = {"trials": 2, "executor": "inline", "sampler": "random", "progress": False, "overrides": settings}
    whole = door.run(TINY, name="whole", strategy="none", home=tmp_path / "home", **asked)
    stops = {"name": "threshold", "lower": 0.5}
    phased = door.run(TINY, name="phased", strategy=stops, home=tmp_path / "home", **asked)
    assert [*phased.trials()["state"]] == ["complete", "pruned"]
    best, expected = phased.best, whole.best
    assert (best["number"], best["value"], best["epoch"]) == (1, expected["value"], 5)
    assert best["finished"]["study"] == "phased-finish" and best["finished"]["stopped"] < 5
    assert "/phased-finish/" in best["checkpoint"] and best["checkpoint_epoch"] == expected["checkpoint_epoch"]
    ours, theirs = (study.load_model(1).state_dict() for study in (phased, whole))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert verify(Home(tmp_path / "home"), Home(tmp_path / "home").storage).differences == []


def test_what_waits_in_order_is_trained_to_its_end_and_may_go_on_later(tmp_path, file):
    """Of three trials one is promoted, to epoch 3, and trial 1 stands best, at epoch 1."""
    parts, once = Home(tmp_path / "parts"), Home(tmp_path / "once")
    ordered = ("--strategy", "asha-promote", "--order", "ordered")
    ran = run(parts, file, *ordered)
    assert "crossing: complete, 0 of 3 trials ended (3 paused)" in ran.output
    assert "best: trial 1, loss 0.2\n  trained to epoch 6 after it was stopped at epoch 1" in ran.output
    assert best(parts) == (1, pytest.approx(0.2)) and verify(parts, parts.storage).differences == []
    answer = refused(hpo("rm", "2", "--study", "crossing", "--yes", home=parts), 2)
    assert "trial 2 of study 'crossing' waits at a rung, and may go on once the study has more trials" in answer
    run(parts, file, *ordered, trials=9)
    run(once, file, *ordered, "--finish", "none", trials=9)
    assert digest(parts, "crossing") == digest(once, "crossing")
    assert verify(parts, parts.storage).differences == []


@pytest.fixture
def timed(tmp_path, file) -> Home:
    """A search of three trials by time alone: 950 of 1000 seconds are used, and each stopped trial took 20 for
    its two epochs."""
    home = Home(tmp_path / "home")
    run(home, file, "--finish", "none")
    with closing(Ledger(home.storage)) as ledger:
        ledger.transact(_bound_by_time)
    return home


def _bound_by_time(connection: Connection) -> None:
    study = queries.study_row(connection, "crossing")
    spec = {**study.spec.json, "finish": "auto"}
    values = {"requested": 0, "max_seconds": 1000.0, "seconds_used": 950.0, "state": "open", "spec": spec}
    values |= {"revision": studies_table.c.revision + 1}  # the mirror sends that it goes on
    connection.execute(update(studies_table).where(studies_table.c.id == study.id).values(**values))
    connection.execute(update(attempts).values(ended_at=attempts.c.started_at + 20.0))


def count(home: Home, study: str) -> int:
    with closing(Ledger(home.storage)) as ledger, ledger.read() as connection:
        return len(queries.trial_rows(connection, queries.study_row(connection, study).id))


def reserved(home: Home, seconds: float) -> float:
    with closing(Ledger(home.storage)) as ledger, ledger.read() as connection:
        return finish.reserved(connection, "crossing", seconds)


def test_a_search_bounded_by_time_alone_leaves_the_phase_its_part(timed):
    """Seven epochs at ten seconds each and a start of five seconds are reserved, so the search ends at 925 seconds.

    With a second trial they would be more than a tenth.
    """
    assert reserved(timed, 1000.0) == pytest.approx(75.0) and reserved(timed, 1600.0) == pytest.approx(150.0)
    assert reserved(timed, 110.0) == 0.0, "more than half of the time"
    ran = hpo("resume", "--study", "crossing", home=timed)
    assert ran.exit_code == 0, ran.output
    assert "trial 1 begins again to epoch 6" in ran.output and f"best: trial 1, loss 0.2\n  {AFTER}" in ran.output
    assert count(timed, "crossing") == 3 and count(timed, "crossing-finish") == 1


def test_a_phase_of_a_search_bounded_by_time_goes_on_once_killed(timed, tmp_path, file):
    """The search stays as it was, also where it is extended later."""
    before = digest(timed, "crossing")
    environ = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": "worker.after_report_commit=kill@2"}
    line = [sys.executable, "-m", "hpo", "resume", "--study", "crossing", "--home", str(timed.root)]
    done = subprocess.run(line, env=environ, capture_output=True, timeout=240)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert reserved(timed, 1000.0) >= 75.0, "what the phase has begun counts in full"
    resumed = hpo("resume", "--study", "crossing", home=timed)
    assert "trial 1 goes on to its end in study crossing-finish" in resumed.output
    assert best(timed) == (1, pytest.approx(0.2)) and digest(timed, "crossing") == before
    assert count(timed, "crossing") == 3 and count(timed, "crossing-finish") == 1
    once = Home(tmp_path / "once")
    run(once, file, "--finish", "none", trials=6)
    run(timed, file, "--time", "1d", trials=6)
    assert digest(timed, "crossing") == digest(once, "crossing")
    assert verify(timed, timed.storage).differences == []
