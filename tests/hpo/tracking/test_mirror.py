"""The mirror: everything in the ledger stands in MLflow, once, whatever is killed and whenever MLflow is away."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from made_rows import study_row
from mirrored import ME, Made, sync
from sqlalchemy import update
from typer.testing import CliRunner

from hpo import supervised
from hpo.cli.main import app
from hpo.clock import SystemClock
from hpo.errors import Busy, UserError
from hpo.ledger import Ledger, leases, queries, transactions
from hpo.ledger.database import tables
from hpo.ledger.process_id import Process
from hpo.search.population.base import breeding
from hpo.search.strategies.registry import STRATEGIES
from hpo.storage.home import Home
from hpo.supervised import SupervisedProcess
from hpo.tracking import curves, mirror_process, pages, projection
from hpo.tracking.base import Unreachable
from hpo.tracking.mirror import Mirror
from hpo.tracking.mlflow import damage
from hpo.tracking.mlflow.damage import damage_of
from hpo.tracking.mlflow.sqlite import open_mlflow
from hpo.tracking.mlflow.tracker import MlflowTracker
from hpo.tracking.uri import tracker_name
from hpo.verify import verify
from trainer.runtime import failpoint

pytestmark = pytest.mark.whole


@pytest.fixture
def home(tmp_path, empty_mlflow) -> Home:
    home = Home.at(tmp_path / "home").create()
    shutil.copyfile(empty_mlflow, home.root / "mlflow.db")
    return home


@pytest.fixture
def made(home):
    study = Made(home)
    yield study
    study.ledger.close()


@pytest.fixture
def tracker(home):
    opened = open_mlflow(home.tracking_uri, home.artifacts)
    yield opened
    opened.close()


def drained(made: Made, tracker: MlflowTracker) -> None:
    result = mirror_process.drain(made.ledger, tracker, made.name, made.home)
    assert (result.behind, result.why) == (0, "")
    report = verify(made.home, made.home.storage, made.home.tracking_uri)
    assert (report.differences, report.behind) == ([], 0)


def shown(made: Made, tracker: MlflowTracker) -> dict[int, tuple[str, str, dict[str, str]]]:
    views = tracker.find(made.name, made.uid, children=True)
    assert len({view.uid for view in views}) == len(views)
    return {int(v.uid.split("/")[1]): (v.status, v.tags["hpo.state"], dict(v.tags)) for v in views}


def client(home: Home):
    from mlflow import MlflowClient

    return MlflowClient(home.tracking_uri)


def test_states_are_told_apart(made, tracker):
    made.ask(8)
    for kind, values, error in (
        ("complete", [0.5], ""),
        ("pruned", [0.1], ""),
        ("paused", None, ""),
        ("nonfinite", None, "loss is NaN at step 3"),
        ("user_error", None, "ZeroDivisionError: division by zero"),
        ("preempted", None, ""),
    ):
        taken = made.claim()
        made.report(taken, 1, {"val/loss": 0.5}, epoch=1, stop="third of 3 at epoch 1" if kind == "pruned" else "")
        made.finish(taken, kind, 1, values, error)
        if kind == "preempted":
            break
    # The preempted trial 5 waits again and is claimed again; 6 is running, 7 was never begun.
    again, running = made.claim(), made.claim()
    made.finish(again, "preempted")
    assert (again.number, again.fence, running.number) == (5, 2, 6)
    drained(made, tracker)
    found = shown(made, tracker)
    assert {number: view[:2] for number, view in found.items()} == {
        0: ("FINISHED", "complete"),
        1: ("FINISHED", "pruned"),  # it has not failed
        2: ("SCHEDULED", "paused"),
        3: ("FAILED", "infeasible"),
        4: ("FAILED", "failed"),
        5: ("SCHEDULED", "waiting"),
        6: ("RUNNING", "running"),
    }
    assert found[1][2]["hpo.stopped_by"] == "asha at step 1: third of 3 at epoch 1"
    assert found[1][2][pages.NOTE] == "Pruned: asha at step 1: third of 3 at epoch 1"
    assert found[4][2][pages.NOTE] == "Failed: ZeroDivisionError: division by zero"
    assert found[0][2][pages.NOTE] == "Complete: val/loss 0.5"
    # The least value is that of a trial that was stopped early; an order by the objective has the complete one first.
    values = {view.uid: view.keys for view in tracker.find(made.name, made.uid, children=True)}
    assert [uid.split("/")[1] for uid, keys in values.items() if "objective" in keys] == ["0"]
    assert found[3][2]["hpo.outcome"] == "nonfinite"
    assert found[4][2]["hpo.error"] == "ZeroDivisionError: division by zero"
    assert found[5][2]["hpo.fence"] == "2"
    [parent] = tracker.find(made.name, made.uid)
    assert (parent.status, parent.tags["hpo.state"]) == ("SCHEDULED", "interrupted")
    assert parent.tags["hpo.best.value"] == "0.5"
    best = ["Best: trial 0, val/loss 0.5 (run s-0000)", "", "| parameter | value |", "|---|---|"]
    ended = "Trials: 1 complete, 1 pruned, 1 infeasible, 1 failed."
    assert parent.tags[pages.NOTE].splitlines() == [*best, "| train.optim.lr | 0.1 |", "| opt | adamw |", "", ended]
    assert parent.tags["hpo.spec.strategy"] == "asha"
    assert (parent.tags["hpo.env.torch"], parent.tags["hpo.env.python"]) == ("2.13.0", "3.11.7")
    assert "hunter2" not in str(parent.tags)
    assert {view[2]["mlflow.parentRunId"] for view in found.values()} == {parent.run_id}
    assert found[0][2]["mlflow.source.git.commit"] == "c0ffee"


def test_the_experiment_says_what_its_page_shows_first(made, tracker):
    """Its kind, its description, and the columns and the order of the view that `hpo ui` names."""
    made.complete()
    drained(made, tracker)
    tags = client(made.home).get_experiment_by_name(made.name).tags
    assert tags["mlflow.experimentKind"] == "custom_model_development"
    assert tags[pages.NOTE].startswith("Best: trial 0, ")
    view = json.loads(tags[f"mlflow.sharedViewState.{pages.VIEW}"])
    assert (view["orderByKey"], view["orderByAsc"]) == ("metrics.`objective`", True)
    assert "params.`train.optim.lr`" in view["selectedColumns"]
    assert {"metrics.`objective`", "metrics.`epoch`", "tags.`hpo.stopped_by`"} < {*view["selectedColumns"]}


def test_the_columns_are_of_the_lowest_tier_first(made):
    """A study says by tiers which parameters matter most."""
    space = {"opt": {"tier": 1}, "train.optim.lr": {"tier": 2}}
    with made.ledger.write() as connection:
        connection.execute(update(tables.studies).values(identity={"space": space}))
    made.ask()
    with made.ledger.read() as connection:
        tags = projection.experiment_tags(connection, queries.study_row(connection, "s"))
    columns = json.loads(tags[f"mlflow.sharedViewState.{pages.VIEW}"])["selectedColumns"]
    assert columns.index("params.`opt`") < columns.index("params.`train.optim.lr`")


def curves_of(made: Made, tracker: MlflowTracker) -> dict[str, list[tuple[int, float]]]:
    [parent] = tracker.find(made.name, made.uid)
    found: dict[str, list[tuple[int, float]]] = {}
    for _, point in tracker.points([parent]):
        found.setdefault(point.key, []).append((point.step, point.value))
    return {key: sorted(points) for key, points in found.items()}


def test_the_study_has_curves_in_the_order_of_its_tells(made, tracker):
    """The best value so far, and the trials by state; a trial that ended first may be told of last."""
    made.ask(4)
    for kind, value in (("complete", 0.5), ("user_error", None), ("complete", 0.7), ("complete", 0.25)):
        made.finish(made.claim(), kind, 1, value and [value])
    places = [(2, 0), (1, 1), (0, 2)]
    made.ledger.transact(lambda connection: transactions.ask(connection, made.id, [], places))
    drained(made, tracker)
    assert curves_of(made, tracker) == {
        "best_so_far/objective": [(1, 0.7), (2, 0.7), (3, 0.5)],
        "trials/complete": [(1, 1.0), (3, 2.0)],
        "trials/failed": [(2, 1.0)],
    }
    made.ledger.transact(lambda connection: transactions.ask(connection, made.id, [], [(3, 3)]))
    drained(made, tracker)
    assert curves_of(made, tracker)["best_so_far/objective"] == [(1, 0.7), (2, 0.7), (3, 0.5), (4, 0.25)]


def test_curves_of_several_objectives_and_none_before_a_value(made):
    """Each objective has the best value of its own, whichever trial has it."""
    objectives = [{"metric": one, "direction": to} for one, to in (("loss", "minimize"), ("accuracy", "maximize"))]
    study = study_row(id=made.id, spec={"objectives": objectives})
    made.ask(3)
    for kind, values in (("failed", None), ("complete", [0.5, 0.9]), ("complete", [0.6, 0.95])):
        made.finish(made.claim(), "user_error" if kind == "failed" else kind, 1, values)
    made.ledger.transact(lambda c: transactions.ask(c, made.id, [], [(0, 0), (1, 1), (2, 2)]))
    with made.ledger.read() as connection:
        found = [(one.key, one.step, one.value) for one in curves.points(connection, study, 0)]
        later = [(one.key, one.step, one.value) for one in curves.points(connection, study, 2)]
    assert found[0] == ("trials/failed", 1, 1.0) and [one for one in found if one[1] == 1] == found[:1]
    assert found[-2:] == [("best_so_far/loss", 3, 0.5), ("best_so_far/accuracy", 3, 0.95)]
    assert later == [one for one in found if one[1] > 2]


def test_data_files_are_data_sets_of_the_runs_once(home, tmp_path):
    """By name and digest, of the study and of each trial that was configured with them, also after a kill between
    what is sent and the cursor."""
    made = Made(home)
    digest = hashlib.sha256(b"data").hexdigest()
    identity = {"config": {"data.path": "/x/train.csv"}, "data": {"data.path": digest}}
    with made.ledger.write() as connection:
        connection.execute(update(tables.studies).values(identity=identity))
    made.ask(1, data={"path": "/x/train.csv"})
    made.ask(1, data={"path": "/x/other.csv"})
    for _ in range(2):
        made.finish(made.claim(), "complete", 1, [0.5])
    made.ledger.transact(lambda connection: transactions.ask(connection, made.id, [], [(0, 0), (1, 1)]))
    made.ledger.engine.dispose()

    def body() -> None:
        mirror_process.drain(Ledger(home.storage), MlflowTracker(home.tracking_uri, home.artifacts), "s", home)

    for point in ("mirror.after_send", "mirror.after_study"):
        status = in_child(body, {point: ("kill", 1)})
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    tracker = MlflowTracker(home.tracking_uri, home.artifacts)
    drained(made, tracker)
    runs = [*tracker.find("s", made.uid), *tracker.find("s", made.uid, children=True)]
    inputs = [client(home).get_run(view.run_id).inputs.dataset_inputs for view in runs]
    assert [len(one) for one in inputs] == [1, 1, 0]
    data = inputs[0][0].dataset
    assert (data.name, data.digest) == ("train.csv", digest[:16]) and json.loads(data.profile)["sha256"] == digest
    assert {one.key: one.value for one in inputs[1][0].tags} == {"mlflow.data.context": "data.path"}
    assert curves_of(made, tracker)["best_so_far/objective"] == [(1, 0.5), (2, 0.5)]
    tracker.close()
    made.ledger.close()


def test_tags_are_set_changed_and_removed_as_in_the_ledger(made, tracker):
    made.complete(2)
    made.complete(1)
    made.tag(1, team="vision", note="=1+1")
    made.tag(-1, project="p")
    drained(made, tracker)

    def of_study() -> dict[str, str]:
        [view] = tracker.find(made.name, made.uid)
        return dict(view.tags)

    assert shown(made, tracker)[1][2]["note"] == "=1+1" and of_study()["project"] == "p"
    made.tag(1, team="speech", note=None)
    made.tag(-1, project=None, owner="ann")
    drained(made, tracker)
    found = shown(made, tracker)[1][2]
    assert found["team"] == "speech" and "note" not in found and "team" not in shown(made, tracker)[0][2]
    assert of_study()["owner"] == "ann" and "project" not in of_study()
    made.tag(1, note="again")
    drained(made, tracker)
    assert shown(made, tracker)[1][2]["note"] == "again"
    [run] = [view.run_id for view in tracker.find(made.name, made.uid, children=True) if view.uid.endswith("/1")]
    tracker._client.set_tag(run, "team", "vision")
    [differs] = verify(made.home, made.home.storage, made.home.tracking_uri).differences
    assert "trial 1: MLflow has the tag team vision, the ledger speech" in differs


def test_the_seed_of_the_proposal_and_of_the_training_are_tagged(made, tracker):
    made.ask(1, train={"seed": 41})
    made.claim()
    drained(made, tracker)
    [(_, _, tags)] = shown(made, tracker).values()
    assert (tags["hpo.seed"], tags["hpo.train_seed"]) == ("7", "41")


def test_params_configuration_and_artifacts(made, tracker):
    made.ask()
    taken = made.claim()
    kept, dropped = made.checkpoint(taken, 1), made.checkpoint(taken, 2)
    made.report(taken, 1, {"val/loss": 1.0}, epoch=1, checkpoint=kept)
    made.report(taken, 2, {"val/loss": 0.5}, epoch=2, checkpoint=dropped)
    made.artifact(taken, "plots/curve.txt", "old")
    drained(made, tracker)
    [view] = tracker.find(made.name, made.uid, children=True)
    assert view.params == {"train.optim.lr": repr(0.1), "opt": "adamw"}
    assert view.tags["hpo.checkpoint.last"] == "checkpoints/step-00000002"
    directory = Path(client(made.home).get_run(view.run_id).info.artifact_uri)
    assert directory.is_relative_to(made.home.artifacts / made.name)
    assert json.loads((directory / "config.json").read_text()) == {"a": 0, "b": [1.5, None]}
    first = directory / "checkpoints/step-00000001/model.safetensors"
    assert first.samefile(kept.path / "model.safetensors")  # a second name, not a second copy
    made.drop(taken, kept)
    made.drop(taken, dropped, "damaged")
    anew = made.checkpoint(taken, 2)
    made.report(taken, 3, {"val/loss": 0.4}, epoch=3, checkpoint=anew)
    made.artifact(taken, "plots/curve.txt", "new")
    drained(made, tracker)
    assert not first.exists()
    assert (directory / "checkpoints/step-00000002/model.safetensors").samefile(anew.path / "model.safetensors")
    assert (directory / "files/plots/curve.txt").read_text() == "new"
    study = json.loads(
        Path(client(made.home).get_run(view.tags["mlflow.parentRunId"]).info.artifact_uri, "study.json").read_text()
    )
    assert study["spec"]["seed"] == 3
    assert "hunter2" not in json.dumps(study)


def test_a_checkpoint_that_retention_takes_away_meanwhile(made, tracker):
    made.ask()
    taken = made.claim()
    ref = made.checkpoint(taken, 1)
    made.report(taken, 1, {"val/loss": 1.0}, checkpoint=ref)
    with made.ledger.read() as connection:
        study = queries.study_row(connection, "s")
        [found] = projection.pending(connection, tracker.name, study, made.home)
    made.drop(taken, ref)
    run_id = tracker.open_trial(tracker.open_study("s", projection.study_run(study)), found.run)
    tracker.send(run_id, found.batch)
    assert set(tracker.digests(run_id)) == {"config.json"}
    drained(made, tracker)  # finds both runs by their tags


def test_a_trial_that_is_refused_at_first_has_one_run(made, tracker):
    """Retention may take a checkpoint between the look at the ledger and the link to its files."""
    made.ask()
    taken = made.claim()
    ref = made.checkpoint(taken, 1)
    made.report(taken, 1, {"val/m0": 1.0}, epoch=1, checkpoint=ref)
    files = {file: file.read_bytes() for file in ref.path.iterdir()}
    for file in files:
        file.unlink()
    lease = leases.acquire(made.ledger, f"mirror:{made.id}", "s", ME, SystemClock(), 5)
    looking = Mirror(made.ledger, tracker, made.name, made.home, lease, SystemClock())
    looking.look()
    for file, content in files.items():
        file.write_bytes(content)
    made.report(taken, 2, {"val/m0": 0.5}, epoch=2)
    made.finish(taken, "complete", 2, [0.5])
    looking.look(leaving=True)
    lease.release()
    assert len(tracker.find(made.name, made.uid, children=True)) == 1
    assert mirror_process.behind(made.ledger, tracker.name, made.name) == 0


def test_values_that_are_not_finite_and_names_mlflow_refuses(made, tracker):
    made.ask()
    taken = made.claim()
    made.report(
        taken, 1, {"val/loss": math.nan, "up": math.inf, "down": -math.inf, "lr (µ)": 1e-7, "a//b": 0.1 + 0.2}, epoch=1
    )
    made.report(taken, 1, {"val/loss": 2.0}, fold=1, epoch=1)
    made.report(taken, 2, {"val/loss": 0.1})
    drained(made, tracker)
    [view] = tracker.find(made.name, made.uid, children=True)
    assert view.tags["hpo.nonfinite"] == "down, up, val/loss"
    points = {(p.key, p.step): p.value for _, p in tracker.points([view])}
    assert math.isnan(points["val/loss", 1])
    assert points["up", 1] == 1.7976931348623157e308
    assert points["fold1/val/loss", 1] == 2.0
    assert points["epoch", 1] == points["fold1/epoch", 1] == 1.0
    assert ("epoch", 2) not in points
    odd = {key for key, _ in points} - {"val/loss", "up", "down", "epoch", "fold1/val/loss", "fold1/epoch"}
    assert {key.rpartition("-")[0] for key in odd} == {"lr _µ_", "a/b"}
    assert 0.1 + 0.2 in points.values()


def test_a_running_trial_arrives_bit_by_bit(made, tracker):
    made.ask()
    taken = made.claim()
    assert mirror_process.behind(made.ledger, tracker.name, "s") == 1 + 2  # the study, the ask and the claim
    for step in (1, 2, 3):
        made.report(taken, step, {"val/loss": 1 / step, "late" if step == 3 else "early": 1.0}, epoch=step)
        drained(made, tracker)
    # A second attempt replays step 3: what is there stands, what is new comes, the epoch keeps its first time.
    made.finish(taken, "preempted")
    taken = made.claim()
    made.report(taken, 3, {"val/loss": 9.0, "new": 4.0}, epoch=3)
    assert mirror_process.behind(made.ledger, tracker.name, "s") == 3
    assert verify(made.home, made.home.storage, made.home.tracking_uri).differences == []
    drained(made, tracker)
    [view] = tracker.find(made.name, made.uid, children=True)
    points = [(p.key, p.step, p.value) for _, p in tracker.points([view])]
    assert len(points) == len(set(points)) == 3 + 3 + 1 + 3
    assert ("val/loss", 3, 1 / 3) in points
    made.finish(taken, "complete", 3, [1 / 3])
    drained(made, tracker)
    assert [(v, s) for v, s, _ in shown(made, tracker).values()] == [("FINISHED", "complete")]
    assert ("objective", 3, 1 / 3) in [
        (p.key, p.step, p.value) for _, p in tracker.points(tracker.find("s", made.uid, children=True))
    ]


def in_child(body: Callable[[], None], points: dict[str, tuple[str, int]]) -> int:
    """Run `body` in a fork with these failpoints; its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            failpoint._TESTING, failpoint._POINTS = True, points
            body()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


POINTS = ("mirror.after_create_run", "mirror.after_send", "mirror.after_cursor")
KILLS = [(point, hit) for point in POINTS for hit in (1, 2, 3)]
SAMPLED = [(POINTS[0], 1), (POINTS[0], 2), (POINTS[1], 2), (POINTS[2], 3)]


@pytest.mark.parametrize(
    ("point", "hit"), [pytest.param(*kill, marks=() if kill in SAMPLED else pytest.mark.slow) for kill in KILLS]
)
def test_killed_at_every_point(home, point, hit):
    """The next mirror finds what was created and not recorded; each run and each point stands once."""
    made = Made(home)
    made.complete(3)
    made.complete(3)
    made.ask(2)
    taken = made.claim()
    made.report(taken, 1, {"val/loss": 1.0}, epoch=1)
    made.tag(0, team="vision", old="x")
    made.ledger.engine.dispose()  # no connection crosses the fork

    def body() -> None:
        ledger = Ledger(home.storage)
        tracker = open_mlflow(home.tracking_uri, home.artifacts)
        mirror_process.drain(ledger, tracker, "s", home)
        made.ledger = ledger
        made.report(taken, 2, {"val/loss": 0.5}, epoch=2)
        made.tag(0, team="speech", old=None)
        mirror_process.drain(ledger, tracker, "s", home)
        made.finish(taken, "complete", 2, [0.5])
        made.complete(2)
        mirror_process.drain(ledger, tracker, "s", home)

    status = in_child(body, {point: ("kill", hit)})
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    before = verify(home, home.storage, home.tracking_uri)
    assert before.behind > 0 or point == "mirror.after_cursor"
    assert [text for text in before.differences if "lease" not in text] == []  # behind, and nothing else
    tracker = MlflowTracker(home.tracking_uri, home.artifacts)
    made.tag(0, team="speech", old=None)  # as the process that was killed had said, or was about to
    drained(made, tracker)
    assert (kept := shown(made, tracker)[0][2])["team"] == "speech" and "old" not in kept
    with made.ledger.read() as connection:
        begun = [row.number for row in queries.trial_rows(connection, made.id) if row.fence]
    assert sorted(shown(made, tracker)) == begun
    tracker.close()
    made.ledger.close()


def test_an_answer_that_is_lost_makes_no_second_run(made, tracker, monkeypatch):
    made.complete(2)
    create, lost = tracker.open_trial, []

    def apply_then_drop(parent, run):
        run_id = create(parent, run)
        if not lost:
            lost.append(run_id)
            raise Unreachable("the connection broke before the answer came")
        return run_id

    monkeypatch.setattr(tracker, "open_trial", apply_then_drop)
    made.complete(2)
    drained(made, tracker)
    views = tracker.find(made.name, made.uid, children=True)
    assert lost[0] in [view.run_id for view in views] and len(views) == 2


def test_a_second_run_of_a_trial_is_deleted(made, tracker):
    """Two mirrors at once, one of them a stopped process that came back, can leave one."""
    made.complete(2)
    drained(made, tracker)
    with made.ledger.read() as connection:
        study = queries.study_row(connection, "s")
        [trial] = projection.everything(connection, study, made.home)
    [view] = tracker.find("s", made.uid, children=True)
    tracker.open_trial(view.tags["mlflow.parentRunId"], trial.run)
    report = verify(made.home, made.home.storage, made.home.tracking_uri)
    assert any("2 runs for trial 0" in text for text in report.differences)
    made.complete(2)
    drained(made, MlflowTracker(made.home.tracking_uri, made.home.artifacts))
    assert view.run_id in [v.run_id for v in tracker.find("s", made.uid, children=True)]


def test_a_run_that_was_deleted_in_mlflow_holds_up_no_other(made, tracker):
    taken = made.complete(2)
    made.ask()
    other = made.claim()
    drained(made, tracker)
    views = {v.tags["hpo.trial"]: v.run_id for v in tracker.find("s", made.uid, children=True)}
    client(made.home).delete_run(views["1"])
    made.report(other, 1, {"val/loss": 1.0})
    made.complete(2)
    result = mirror_process.drain(made.ledger, tracker, "s", made.home)
    assert result.behind == 1 and "trial 1" in result.why
    assert "behind by 1" in mirror_process.lag(result, tracker.name) and "hpo sync" in mirror_process.lag(
        result, tracker.name
    )
    report = verify(made.home, made.home.storage, made.home.tracking_uri)
    assert report.behind == 1
    assert [t for t in report.differences if "trial 1" in t and "not in MLflow" in t] == report.differences
    mirror_process.forget(made.ledger, tracker.name, "s")
    drained(made, MlflowTracker(made.home.tracking_uri, made.home.artifacts))
    assert sorted(shown(made, tracker)) == [0, 1, 2]
    assert taken.number == 0


def test_a_database_that_was_lost_is_filled_again(made, tracker, empty_mlflow):
    made.complete(2)
    drained(made, tracker)
    tracker.close()
    for name in ("mlflow.db", "mlflow.db-wal", "mlflow.db-shm"):
        (made.home.root / name).unlink(missing_ok=True)
    shutil.rmtree(made.home.artifacts)
    shutil.copyfile(empty_mlflow, made.home.root / "mlflow.db")
    assert verify(made.home, made.home.storage, made.home.tracking_uri).differences
    drained(made, MlflowTracker(made.home.tracking_uri, made.home.artifacts))


def test_one_mirror_at_a_time(made, tracker):
    with made.ledger.read() as connection:
        study_id = queries.study_row(connection, "s").id
    lease = leases.acquire(made.ledger, f"mirror:{study_id}", "s", ME, SystemClock(), 1.0)
    with pytest.raises(Busy, match="already has a mirror"):
        mirror_process.drain(made.ledger, tracker, "s", made.home)
    lease.release()
    drained(made, tracker)


def test_a_mirror_that_lost_its_lease_moves_no_cursor(made, tracker):
    made.complete(2)
    ours = leases.acquire(made.ledger, f"mirror:{made.id}", "s", Process.current(), SystemClock(), 1.0)
    ours.release()
    leases.acquire(made.ledger, f"mirror:{made.id}", "s", ME, SystemClock(), 1.0)
    with pytest.raises(Busy, match="taken over"):
        mirror_process.Mirror(made.ledger, tracker, "s", made.home, ours, SystemClock()).look()
    assert mirror_process.behind(made.ledger, tracker.name, "s") > 0


def test_no_cursor_moves_before_what_was_sent_is_on_the_disk(made, tracker, monkeypatch):
    """The machine may die in between: rows of a WAL that was not synced are then gone."""
    made.complete()

    def away() -> None:
        raise Unreachable("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(tracker, "flush", away)
        result = mirror_process.drain(made.ledger, tracker, made.name, made.home, seconds=0.0)
    assert result.behind > 0 and result.why == "the disk is full"
    drained(made, tracker)


def test_hpo_sync_sends_every_study_but_the_one_that_is_mirrored(made, home):
    """ENVIRONMENT names a server in the homes that `mirrored` makes: the store in the home is named here."""
    other = Made(home, "t")
    for study in (made, other):
        study.complete()
    lease = leases.acquire(made.ledger, f"mirror:{made.id}", "s", ME, SystemClock(), 60.0)
    for options in ([], ["--json"]):
        words = ["sync", "--home", str(home.root), "--tracking-uri", home.tracking_uri, *options]
        result = CliRunner().invoke(app, words)
        assert (result.exit_code, result.stderr.count("study 's' already has a mirror")) == (3, 1)
    first, second = json.loads(result.stdout)
    assert (first["study"], second["study"]) == ("s", "t")
    assert first["behind"] > 0 and "already has a mirror" in first["why"]
    assert (second["behind"], second["why"]) == (0, "")
    lease.release()


def test_many_trials_are_one_sync(made, tracker, monkeypatch):
    for _ in range(6):
        made.complete()
    drained(made, tracker)
    syncs: list[int] = []
    whole = tracker.flush
    monkeypatch.setattr(tracker, "flush", lambda: syncs.append(1) or whole())
    for _ in range(6):
        made.complete()
    drained(made, tracker)
    assert len(syncs) <= 2, "the trials, and the study's run"


def test_a_mirror_knows_populations_without_importing_them():
    for name in STRATEGIES:
        assert projection._in_generations({"name": name}) == (breeding(name) is not None)


def test_cursors_and_commands_show_no_password():
    assert tracker_name("postgresql://me:hunter2@db/x") == "postgresql://db/x"
    assert tracker_name("https://me:hunter2@h:5000/a?token=1") == "https://h:5000/a"
    assert tracker_name("sqlite:////a/b.db") == "sqlite:////a/b.db"
    assert len(tracker_name("sqlite:///" + "a" * 400)) <= 250
    with pytest.raises(UserError, match=r"ftp://me:\*\*\*@h"):
        MlflowTracker("ftp://me:hunter2@h", Path("x"))


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("killed", [False, True])
def test_the_process(tmp_path, killed, empty_mlflow):
    """Spawned as the driver does it; told to leave, it has drained, also after a SIGKILL."""
    home = Home.at(tmp_path / "home").create()
    if killed:
        shutil.copyfile(empty_mlflow, home.root / "mlflow.db")
    made = Made(home)
    mirroring = mirror_process.spawn(home, home.storage, home.tracking_uri, "s")
    for _ in range(3):
        made.complete(3)
    deadline = time.monotonic() + 60
    while mirror_process.behind(made.ledger, tracker_name(home.tracking_uri), "s") and time.monotonic() < deadline:
        time.sleep(0.1)
    made.complete(3)
    if killed:
        mirroring.kill()
        assert mirroring.process.wait() == -signal.SIGKILL
    made.complete(3)
    assert mirror_process.finish(mirroring, made.ledger, home.tracking_uri, "s") == 0, (
        home.logs / "mirror-s.log"
    ).read_text()
    assert mirroring.process.returncode == 0
    report = verify(home, home.storage, home.tracking_uri)
    assert (report.differences, report.counts["runs"]) == ([], 6)
    made.ledger.close()


# In place of a mirror: each takes the study's lease as one does, and is deaf to its driver.
_STAND_IN = """
import signal, sys, time
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
from hpo.clock import SystemClock
from hpo.ledger import Ledger, leases
from hpo.ledger.process_id import Process
leases.acquire(Ledger(sys.argv[1], create=False), "mirror:1", "s", Process.current(), SystemClock(), 1.0)
print("ready", flush=True)
"""
_AT_WORK = "end = time.monotonic() + 4\nwhile time.monotonic() < end: open(sys.argv[0]).read(); time.sleep(0.1)"
_STILL = "time.sleep(1000)"


def stand_in(made: Made, body: str, then: Callable[..., subprocess.Popen[bytes]] | None = None) -> SupervisedProcess:
    """A mirror's process that does `body`, and what is started after it."""
    script = made.home.root / "stand_in.py"
    script.write_text(_STAND_IN + body)
    begun: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        if begun and then is not None:
            return then(*arguments)
        command = [sys.executable, str(script), made.home.storage]
        begun.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert begun[-1].stdout is not None and begun[-1].stdout.readline() == b"ready\n"
        begun[-1].stdout.close()
        return begun[-1]

    return SupervisedProcess(start, made.home.logs / "log", "the mirror")


@pytest.mark.usefixtures("process")
def test_a_mirror_is_waited_for_while_it_does_anything(made, monkeypatch):
    """One that reads a file again and again for longer than one that does nothing is given, without a commit."""
    monkeypatch.setattr(supervised, "SILENCE", 2.0)
    made.complete(2)
    mirroring = stand_in(made, _AT_WORK)
    mirror_process.finish(mirroring, made.ledger, made.home.tracking_uri, "s")
    assert mirroring.process.returncode == 0


@pytest.mark.usefixtures("process")
def test_a_mirror_that_does_nothing_is_ended_and_leaves_no_lease(made, monkeypatch):
    monkeypatch.setattr(supervised, "SILENCE", 1.0)
    made.complete(2)
    told: list[int] = []
    mirroring = stand_in(made, _STILL)
    left = mirror_process.finish(mirroring, made.ledger, made.home.tracking_uri, "s", told.append)
    assert mirroring.process.returncode == -signal.SIGKILL
    assert left == mirror_process.behind(made.ledger, tracker_name(made.home.tracking_uri), "s") > 0
    assert made.ledger.look(lambda connection: leases.holder(connection, "mirror:1")) is None
    assert verify(made.home, made.home.storage, made.home.tracking_uri).differences == []


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("code", [1, 2, 3, -signal.SIGKILL])
def test_a_mirror_is_started_again_whatever_it_ended_by(made, code):
    """As after a spell in which its files took no changes: the second one sends everything."""
    made.complete(2)
    ends = f"import os; os._exit({code})" if code > 0 else "import os; os.kill(os.getpid(), 9)"
    real = mirror_process.spawn(made.home, made.home.storage, made.home.tracking_uri, "s")
    real.kill()
    real.process.wait()
    mirroring = stand_in(made, ends, real.start)
    mirroring.process.wait()
    assert mirror_process.finish(mirroring, made.ledger, made.home.tracking_uri, "s") == 0
    assert verify(made.home, made.home.storage, made.home.tracking_uri).differences == []


@pytest.mark.parametrize(
    "harm", [lambda raw: raw[:5000], lambda raw: b"x" * len(raw), lambda raw: raw[: len(raw) // 2]]
)
def test_a_damaged_store_is_told_of_with_its_remedy_which_helps(made, home, harm, monkeypatch):
    made.complete(2)
    sync(made)
    database = home.root / "mlflow.db"
    raw = harm(database.read_bytes())
    for suffix in ("-wal", "-shm"):
        Path(f"{database}{suffix}").unlink(missing_ok=True)
    database.write_bytes(raw)
    remedy = rf"MLflow's database {database} is damaged \(.*\): move it away.*`hpo sync.*makes it anew"
    made.complete(2)
    with pytest.raises(Unreachable, match=remedy):
        sync(made)
    [told] = verify(home, home.storage, home.tracking_uri).differences
    assert re.search(remedy, told) and damage_of(home.tracking_uri) == told
    with monkeypatch.context() as one_who_may_only_read:
        one_who_may_only_read.setattr(damage, "writable", lambda _: False)
        assert damage_of(home.tracking_uri) == told
    for path in home.root.glob("mlflow.db*"):
        path.unlink()
    assert damage_of(home.tracking_uri) == ""
    sync(made)
    assert verify(home, home.storage, home.tracking_uri).differences == []
    assert damage_of(home.tracking_uri) == damage_of("http://127.0.0.1:9") == ""


def taken_back(made: Made, backup: Path) -> None:
    """The ledger is what it was at the backup, as after a WAL that was lost."""
    made.ledger.close()
    for path in made.home.root.glob("ledger.db*"):
        path.unlink()
    shutil.copyfile(backup, made.home.root / "ledger.db")
    made.ledger = Ledger(made.home.storage)
    made.count = 3


@pytest.mark.parametrize("then", ["nothing", "as much", "more"])
def test_runs_that_are_ahead_of_the_ledger_are_made_anew(made, home, tracker, tmp_path, then):
    """The ledger goes back to before a trial's second epoch, another's end and a third one's beginning, and each goes
    on, or does not, before the mirror looks again. One that has ended before keeps its run."""
    made.complete(2)
    made.ask(2)
    first, second = made.claim(), made.claim()
    for taken in (first, second):
        made.report(taken, 1, {"val/loss": 1.0}, epoch=1, checkpoint=made.checkpoint(taken, 1))
    drained(made, tracker)
    backup = tmp_path / "backup.db"
    with closing(sqlite3.connect(home.root / "ledger.db")) as source, closing(sqlite3.connect(backup)) as copy:
        source.backup(copy)

    def go_on() -> None:
        made.report(first, 2, {"val/loss": 0.5}, epoch=2)
        made.finish(second, "complete", 1, [1.0])
        made.complete(3)

    go_on()
    drained(made, tracker)
    before = {view.uid: view.run_id for view in tracker.find("s", made.uid, children=True)}
    taken_back(made, backup)
    if then != "nothing":
        time.sleep(0.01)  # the second time has other timestamps
        go_on()
    if then == "more":
        made.report(first, 3, {"val/loss": 0.25}, epoch=3)
        made.finish(first, "complete", 3, [0.25])
    told = verify(home, home.storage, home.tracking_uri).differences
    named = [one for one in told if re.search(r"trial \d: MLflow shows what .* `hpo sync.*` makes its", one)]
    assert len(named) == 3 and not [one for one in told if "times in MLflow" in one]
    drained(made, tracker)
    after = {view.uid: view.run_id for view in tracker.find("s", made.uid, children=True)}
    kept = {uid for uid in before if before[uid] == after.get(uid)}
    assert kept == {f"{made.uid}/0"}
    assert len(after) == (3 if then == "nothing" else 4)


def test_a_ledger_that_was_only_copied_keeps_its_runs(made, tracker):
    """Neither cursors that are gone nor new trials make a run one that is ahead."""
    made.complete(2)
    drained(made, tracker)
    before = {view.uid: view.run_id for view in tracker.find("s", made.uid, children=True)}
    mirror_process.forget(made.ledger, tracker.name, "s")
    drained(made, tracker)
    made.complete(2)
    drained(made, tracker)
    after = {view.uid: view.run_id for view in tracker.find("s", made.uid, children=True)}
    assert before.items() < after.items()
