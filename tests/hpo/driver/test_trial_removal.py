"""`hpo rm N`: what goes, what stays exact, who is refused, and how a removal that was killed is finished."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from mirrored import SPEC, Made, sync
from places import HARNESS
from sqlalchemy import update
from study_runs import drive, hpo, known, refused

import hpo as package
from hpo.analysis.report import data
from hpo.analysis.serve.live_study import LiveStudy
from hpo.clock import SystemClock
from hpo.ledger import Ledger, leases, queries, removed
from hpo.ledger.database.tables import studies
from hpo.ledger.process_id import Process
from hpo.ledger.views import mirror as mirror_queries
from hpo.storage.home import Home
from hpo.tracking.mlflow.tracker import MlflowTracker
from hpo.tracking.uri import tracker_name
from hpo.verify import verify

from .test_removal import study

CURVES = str(HARNESS / "curves_study.py")
TPE = {"reference": CURVES, "window": 4, "sampler": "tpe", "strategy": "asha"}


@pytest.fixture
def made(home, empty_mlflow) -> Iterator[Made]:
    """A study of two trials, of which trial 0 is complete, with checkpoints, files and runs."""
    shutil.copyfile(empty_mlflow, home.create().root / "mlflow.db")
    one = study(home, "s")
    with one.ledger.write() as connection:
        spec = SPEC | {"overrides": {}, "order": "ordered", "window": 4}
        connection.execute(update(studies).values(spec=spec, revision=studies.c.revision + 1))
    sync(one)
    yield one
    one.ledger.close()


def rm(home: Home, *arguments: str):
    return hpo("rm", *arguments, "--study", "s", home=home)


def sound(home: Home) -> None:
    report = verify(home, home.storage)
    assert (report.differences, report.behind) == ([], 0)


def numbers_in_mlflow(home: Home, made: Made) -> list[str]:
    tracker = MlflowTracker(home.tracking_uri, home.artifacts)
    views = tracker.find("s", made.uid, children=True)
    tracker.close()
    return sorted(view.uid.rpartition("/")[2] for view in views)


def digest(made: Made) -> str:
    return made.ledger.look(lambda c: queries.digest(c, queries.study_row(c, "s")))


def test_a_trial_goes_from_files_and_mlflow_and_its_row_stays(made, home):
    before = digest(made)
    run_id = made.ledger.look(lambda c: mirror_queries.cursors(c, tracker_name(home.tracking_uri), made.id))[0].run_id
    assert [path for path in home.artifacts.rglob("*") if run_id in str(path)]
    assert rm(home, "0", "--dry-run").stdout.startswith("would remove trial 0 of study s: 1 checkpoint (")
    assert numbers_in_mlflow(home, made) == ["0", "1"]
    said = rm(home, "0", "--yes", "--json")
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout) | {"size": 0} == {
        "name": "s",
        "trials": [0],
        "checkpoints": 1,
        "size": 0,
        "freed": [],
        "deleted": True,
    }
    assert numbers_in_mlflow(home, made) == ["1"]
    assert not home.checkpoints("s", 0).exists() and not home.files("s", 0).exists()
    assert home.checkpoints("s", 1).exists() and home.files("s", 1).exists()
    assert [path for path in home.artifacts.rglob("*") if run_id in str(path)] == []
    assert digest(made) == before
    sound(home)
    again = rm(home, "0", "--yes")
    assert again.exit_code == 0 and "its runs (removed before: 0)" in again.output, "removed again it stays removed"
    sound(home)


def test_nothing_shows_a_trial_that_is_removed(made, home):
    live = LiveStudy(made.ledger, home, "s")
    live.look()
    assert rm(home, "0", "--yes").exit_code == 0
    assert made.ledger.look(lambda c: queries.bests(c, queries.study_row(c, "s"))) == []
    compared = json.loads(hpo("compare", "--study", "s", "--json", home=home).stdout)
    assert [row["number"] for row in compared] == [1]
    assert data.read(made.ledger, home, "s").trials["number"] == [1]
    assert data.read(made.ledger, home, "s").answer["best"] == []
    live.look()
    assert live.known is not None and live.known.report["trials"]["number"] == [1]
    assert package.open("s", home=home.root).trials()["number"].tolist() == [1]
    tracker = MlflowTracker(home.tracking_uri, home.artifacts)
    [parent] = tracker.find("s", made.uid)
    tracker.close()
    assert "hpo.best.trial" not in parent.tags or parent.tags["hpo.best.trial"] != "0"
    status = hpo("status", "--study", "s", home=home).stdout
    assert "1 complete, 1 failed; 1 of them removed, which trained " in status
    shown = json.loads(hpo("show", "0", "--study", "s", "--json", home=home).stdout)
    assert [event["kind"] for event in shown["events"]][-2:] == [removed.REMOVED, removed.FREED]


def test_what_removed_trials_cost_is_said_alike_everywhere(tmp_path):
    """Oracle: the rows of the trials. What is left is counted as such, and one sentence says what is gone."""
    home = Home(tmp_path / "home")
    drive(home, trials=10, **TPE)
    ledger = Ledger(home.storage)
    rows = ledger.look(lambda c: queries.trial_rows(c, queries.study_row(c, "curves").id))
    epochs = {row.number: row.epoch - row.from_epoch for row in rows}
    complete = known(home)[1].best
    assert complete is not None
    gone = [complete.number, *[row.number for row in rows if row.state == "pruned"][:2]]
    assert hpo("rm", *map(str, gone), "--study", "curves", "--yes", "--leave-mlflow", home=home).exit_code == 0
    trained = f"trained {sum(epochs[number] for number in gone)} epochs in "
    assert f"; 3 of them removed, which {trained}" in hpo("status", "--study", "curves", home=home).stdout
    for command in ("best", "compare"):
        said = hpo(command, "--study", "curves", home=home).stdout.splitlines()
        assert said[-1].startswith(f"3 trials are removed and not shown: they {trained}"), command
    report = data.read(ledger, home, "curves")
    ledger.close()
    assert report.removed.startswith(f"3 trials are removed and not shown: they {trained}")
    assert sum(report.counts.values()) == len(report.trials["number"]) == 7
    costs = report.cost["by_state"]
    assert costs["removed"]["trials"] == 3 and costs["removed"]["seconds"] > 0
    assert {state: cost["trials"] for state, cost in costs.items() if state != "removed"} == report.counts
    assert sum(cost["epochs"] for cost in costs.values()) == report.cost["epochs"] == sum(epochs.values())
    page = tmp_path / "page.html"
    assert hpo("report", "curves", "--to", str(page), home=home).exit_code == 0
    assert "is the best of 7 trials" in page.read_text() and report.removed in page.read_text()


def test_the_sampler_the_digest_and_the_resume_stay_exact(tmp_path):
    """Oracle: the study that nobody has touched."""
    whole, other = Home(tmp_path / "whole"), Home(tmp_path / "other")
    expected = drive(whole, trials=24, **TPE)[0]
    drive(other, trials=14, **TPE)
    complete = known(other)[1].best
    assert complete is not None
    gone = sorted({complete.number, 3, 5})
    assert hpo("rm", *map(str, gone), "--study", "curves", "--yes", "--leave-mlflow", home=other).exit_code == 0
    assert known(other)[1].best != complete
    digest, status, state, _ = drive(other, trials=24, name="curves")
    assert (digest, state) == (expected, "complete")
    assert sum(status.trials.values()) == 24, "no number is used again"
    assert status.best is not None and status.best.number not in gone
    with Ledger(other.storage).read() as connection:
        shown = [row.number for row in queries.trial_rows(connection, 1)]
    assert shown == [number for number in range(24) if number not in gone]


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("where", ["mark", "runs", "files"])
def test_killed_anywhere_the_next_call_finishes(made, home, where):
    environ = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": f"removal.after_trial_{where}=kill@1"}
    line = [sys.executable, "-m", "hpo", "rm", "0", "--study", "s", "--yes", "--home", str(home.root)]
    killed = subprocess.run(line, env=environ, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert made.ledger.look(lambda c: queries.bests(c, queries.study_row(c, "s"))) == []
    differences = verify(home, home.storage).differences
    assert "s: the removal of trial 0 was cut short: `hpo rm 0 --study s` finishes it" in differences
    assert rm(home, "0", "--yes").exit_code == 0
    assert numbers_in_mlflow(home, made) == ["1"] and not home.checkpoints("s", 0).exists()
    sound(home)


@pytest.mark.parametrize("state", ["waiting", "running", "paused"])
def test_a_trial_that_has_not_ended_is_refused(made, home, state):
    with made.ledger.write() as connection:
        connection.execute(update(studies).values(state="open"))
    made.ask()
    if state != "waiting":
        taken = made.claim()
        if state == "paused":
            made.finish(taken, "paused", 1, None)
    before = digest(made)
    error = refused(rm(home, "0", "2", "--yes"), 2)
    assert f"trial 2 of study 's' is {state}: only a trial that has ended is removed" in error
    assert digest(made) == before and numbers_in_mlflow(home, made)[:2] == ["0", "1"], "trial 0 stays as well"


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("7", "--yes"), 2, "study 's' has no trial 7: it has trials 0 to 1"),
        (("0",), 2, "give --yes to delete it, since nobody can be asked here"),
        (("best", "--yes"), 2, "Input should be a valid integer"),
        (("--yes", "--", "-1"), 2, ""),
    ],
)
def test_bad_input_is_one_sentence(made, home, arguments, code, sentence):
    assert sentence in refused(rm(home, *arguments), code)
    sound(home)


def test_a_study_that_is_driven_keeps_its_trials(made, home):
    lease = leases.acquire(made.ledger, f"driver:{made.id}", "s", Process.current(), SystemClock(), 30)
    try:
        refused(rm(home, "0", "--yes"), 3)
    finally:
        lease.release()
    assert home.checkpoints("s", 0).exists()


def test_a_trial_that_another_study_begins_from_is_kept(made, home):
    [path] = [entry for entry in home.checkpoints("s", 0).iterdir() if entry.is_dir()]
    other = study(home, "t")
    with other.ledger.write() as connection:
        row = queries.study_row(connection, "t")
        spec = row.spec.json | {"overrides": {"train.resume_from": str(path)}}
        connection.execute(update(studies).where(studies.c.name == "t").values(spec=spec))
    assert "study 't' begins from a checkpoint of study 's'" in refused(rm(home, "0", "--yes"), 2)
    assert rm(home, "1", "--yes").exit_code == 0
    other.ledger.close()
