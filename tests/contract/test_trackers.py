"""What every tracker must do: MLflow with SQLite, by its client and without, with PostgreSQL, and through a server."""

from __future__ import annotations

import hashlib
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rounds import rounds

from hpo.errors import UserError
from hpo.storage.home import Home
from hpo.testing import check_tracker
from hpo.tracking.base import Batch, Model, Point, Refused, Run, Tracker, Unreachable
from hpo.tracking.files import link
from hpo.tracking.mlflow.client import silence
from hpo.tracking.mlflow.sqlite import SqliteTracker
from hpo.tracking.mlflow.store import initialise
from hpo.tracking.mlflow.tracker import MlflowTracker
from hpo.tracking.ui import serve as ui
from hpo.tracking.ui.gate import token_of
from hpo.tracking.uri import check_uri

STUDY = Run("u" * 32, "s", 1_700_000_000_000, {"hpo.run_uid": "u" * 32, "hpo.study": "s"}, "studies.mlp", "c0ffee")


def trial(number: int) -> Run:
    uid = f"{STUDY.uid}/{number}"
    return Run(uid, f"s-{number:04d}", 1_700_000_001_000, {"hpo.run_uid": uid, "hpo.study": "s"})


def _server(path: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = Home.at(path).create()
    initialise(home.root / "mlflow.db", home.artifacts)
    process = ui.start(home, home.tracking_uri, port)
    deadline = time.monotonic() + 120
    while not ui.answers("127.0.0.1", port):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_TOKEN", token_of(home))
        yield f"http://127.0.0.1:{port}"
    ui.halt(process)


@pytest.fixture(scope="module", params=["rows", "sqlite", "postgresql", pytest.param("server", marks=pytest.mark.slow)])
def uri(request, tmp_path_factory) -> Iterator[str]:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "server":
        yield from _server(path)
    elif request.param == "postgresql":
        yield request.getfixturevalue("postgres_database")()
    else:
        yield f"sqlite:///{path / 'mlflow.db'}"


@pytest.fixture(scope="module")
def tracker(uri, tmp_path_factory) -> Iterator[Tracker]:
    kind = SqliteTracker if Path(uri).parent.name.startswith("rows") else MlflowTracker
    opened = kind(uri, tmp_path_factory.mktemp("artifacts") / "artifacts")
    yield opened
    opened.close()


@pytest.fixture
def opened(tracker) -> Iterator[tuple[Tracker, str, str]]:
    """A tracker, a study's run and a trial's; gone afterwards."""
    parent = tracker.open_study("s", STUDY)
    child = tracker.open_trial(parent, trial(0))
    yield tracker, parent, child
    for view in [*tracker.find("s", STUDY.uid), *tracker.find("s", STUDY.uid, children=True)]:
        tracker.discard(view.run_id)


def test_it_keeps_the_promises_for_trackers(uri, tmp_path):
    check_tracker(uri, tmp_path / "artifacts")


def test_runs_are_found_by_uid(opened):
    tracker, parent, child = opened
    [study], [run] = tracker.find("s", STUDY.uid), tracker.find("s", STUDY.uid, children=True)
    assert (study.run_id, study.uid, study.status, study.ended_at) == (parent, STUDY.uid, "RUNNING", None)
    assert (run.run_id, run.uid) == (child, f"{STUDY.uid}/0")
    assert run.tags["mlflow.parentRunId"] == parent
    assert (study.tags["mlflow.source.git.commit"], study.tags["mlflow.source.name"]) == ("c0ffee", "studies.mlp")
    assert tracker.find("s", "v" * 32) == []
    tracker.discard(child)
    assert tracker.find("s", STUDY.uid, children=True) == []


def test_a_batch_sent_twice_changes_nothing(opened, tmp_path):
    tracker, _, child = opened
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "weights").write_bytes(b"\x00\x01")
    (tmp_path / "note").write_text("seen")
    points = [Point(f"m{k % 7}", k, 1_700_000_002_000 + k, 0.1 * k) for k in range(1200)]  # above MLflow's 1000 a call
    odd = [Point("odd", 1, 5, math.nan), Point("odd", 2, 5, math.inf), Point("odd", 3, 5, -math.inf)]
    exact = [Point("exact", 1, 5, 0.1 + 0.2), Point("exact", 2, 5, 5e-324), Point("exact", 3, 5, 2.0**53 + 2)]
    batch = Batch(
        points=[*points, *odd, *exact],
        params={f"p.{k}": repr(k / 7) for k in range(150)},  # above MLflow's 100 a call
        tags={"hpo.state": "complete", "µ": "ß"},
        texts={"config.json": '{"ä": 1}'},
        files={"checkpoints/step": tmp_path / "step", "files/sub/renamed.txt": tmp_path / "note"},
        status="FINISHED",
        ended_at=1_700_000_009_000,
    )
    for _ in range(2):
        tracker.send(child, batch)
    [view] = tracker.find("s", STUDY.uid, children=True)
    assert (view.status, view.ended_at, view.params) == ("FINISHED", 1_700_000_009_000, batch.params)
    assert view.tags["µ"] == "ß"
    stored = [point for run_id, point in tracker.points([view]) if run_id == child]
    assert len(stored) == len(batch.points)
    assert {p for p in stored if p.key != "odd"} == {*points, *exact}
    big = 1.7976931348623157e308
    assert [repr(p.value) for p in sorted(p for p in stored if p.key == "odd")] == ["nan", repr(big), repr(-big)]
    assert tracker.digests(child) == {
        "config.json": hashlib.sha256('{"ä": 1}'.encode()).hexdigest(),
        "checkpoints/step/weights": hashlib.sha256(b"\x00\x01").hexdigest(),
        "files/sub/renamed.txt": hashlib.sha256(b"seen").hexdigest(),
    }
    for _ in range(2):
        tracker.send(child, Batch(removed=["checkpoints/step"]))
    assert sorted(tracker.digests(child)) == ["config.json", "files/sub/renamed.txt"]


def test_statuses_come_and_go_and_a_new_text_replaces_the_old(opened):
    tracker, _, child = opened
    for status in ("SCHEDULED", "RUNNING", "KILLED", "FAILED", "RUNNING"):
        tracker.send(child, Batch(status=status, tags={"hpo.state": status}, texts={"t": status}))
        [view] = tracker.find("s", STUDY.uid, children=True)
        assert (view.status, view.tags["hpo.state"], view.ended_at) == (status, status, None)
        assert tracker.digests(child) == {"t": hashlib.sha256(status.encode()).hexdigest()}


class Mortal:
    """An MLflow client, or a connection, that dies at its n-th call, before or after the call is carried out."""

    def __init__(self, client: Any, n: int, after: bool) -> None:
        self.client, self.left, self.after = client, n, after

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)
        if not callable(method):
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0 and not self.after:
                raise KeyboardInterrupt
            result = method(*args, **kwargs)
            if self.left == 0:
                raise KeyboardInterrupt
            return result

        return call


def files_of(tracker: Any, place: str) -> list[str]:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    return [one.path for one in get_artifact_repository(place, tracker._client.tracking_uri).list_artifacts()]


def test_a_model_is_made_once_wherever_its_making_stops(opened, tmp_path):
    tracker, _, child = opened
    (tmp_path / "model.safetensors").write_bytes(b"\x00\x01")
    points = [Point("val/loss", 20, 1_700_000_002_000, 0.1 + 0.2), Point("epoch", 20, 1_700_000_002_000, 2.0)]
    stopped = 0
    # A client's calls: search, create, metrics, run, output, finish; or statements of a connection.
    calls = 17 if isinstance(tracker, SqliteTracker) else 6
    by_rows = isinstance(tracker, SqliteTracker)
    owners, name = ((tracker, tracker._model_rows), "_rows") if by_rows else ((tracker._models,), "_client")
    for n in range(1, calls + 1):
        for after in (False, True):
            tags = {"hpo.step": "20", "hpo.best": "true"}
            files = {"model.safetensors": tmp_path / "model.safetensors"}
            model = Model(f"trial-{n}-{after}", 20, tags, points, {"config.json": "{}"}, files)
            batch = Batch(points=points, models=[model])
            whole = getattr(owners[0], name)
            mortal = Mortal(whole, n, after)
            for owner in owners:
                setattr(owner, name, mortal)
            try:
                tracker.send(child, batch)
            except KeyboardInterrupt:
                stopped += 1
            finally:
                for owner in owners:
                    setattr(owner, name, whole)
            for _ in range(2):
                tracker.send(child, batch)
            [view] = [one for one in tracker.models("s") if one.name == model.name]
            assert (view.run_id, view.finished, view.points) == (child, True, frozenset(points))
            assert tags.items() <= view.tags.items()
            assert sorted(tracker.model_digests(view.model_id)) == ["config.json", "model.safetensors"]
    assert stopped == 2 * calls
    outputs = tracker._client.get_run(child).outputs.model_outputs
    assert len(outputs) == len({one.model_id for one in outputs}) == 2 * calls
    assert {one.step for one in outputs} == {20}
    [run] = tracker.find("s", STUDY.uid, children=True)
    assert {point for _, point in tracker.points([run])} == set(points)
    # An answer that was lost leaves two of a name; the older stays.
    tracker._client.create_logged_model(tracker._experiment("s"), "trial-1-True", child)
    tracker.send(child, batch)
    assert len({one.name for one in tracker.models("s")}) == len(tracker.models("s")) == 2 * calls
    gone, place = batch.models[0].name, tracker._client.get_logged_model(view.model_id).artifact_location
    assert view.name == gone and files_of(tracker, place)
    for _ in range(2):
        tracker.send(child, Batch(removed_models=[gone, "never-made"]))
        assert len(tracker.models("s")) == 2 * calls - 1 and gone not in {one.name for one in tracker.models("s")}
    assert not files_of(tracker, place), "its bytes are freed"
    tracker.discard(child)
    assert tracker.models("s") == []


def test_what_is_refused_is_told_from_an_outage(opened, tmp_path):
    tracker, parent, child = opened
    tracker.send(child, Batch(params={"lr": "0.1"}))
    with pytest.raises(Refused, match="lr"):
        tracker.send(child, Batch(params={"lr": "0.2"}))
    tracker.discard(child)
    with pytest.raises(Refused):
        tracker.send(child, Batch(tags={"a": "b"}))
    tracker.send(parent, Batch(files={"gone": tmp_path / "gone"}))  # retention was faster
    assert tracker.digests(parent) == {}


def test_two_open_a_new_database_at_once(tmp_path):
    failures: list[BaseException] = []

    def open_one() -> None:
        try:
            initialise(tmp_path / "mlflow.db", tmp_path / "artifacts")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=open_one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    tracker = MlflowTracker(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "artifacts")
    assert tracker.open_study("s", STUDY)
    tracker.close()


@rounds(
    ("uri", "why"),
    [
        ("foo", "it has no scheme"),
        ("htp://x", "the scheme 'htp' is not known"),
        ("ftp://me:hunter2@h", r"ftp://me:\*\*\*@h' cannot be used"),
        ("http://", "it names no host"),
        ("http://[x", "is not a URI"),
        ("sqlite://", "it names no file"),
        ("sqlite:///:memory:", "it names no file"),
        ("sqlite:////dev/null/x.db", "the directory /dev/null does not exist"),
        ("sqlite:////tmp", "/tmp is a directory"),
    ],
)
def test_a_uri_that_cannot_be_used(uri, why):
    with pytest.raises(UserError, match=why) as caught:
        check_uri(uri)
    assert "hunter2" not in str(caught.value)


def test_silence(tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert silence(uri) == ""
    assert "does not answer now" in silence(uri) and "hpo sync" in silence(uri)
    assert silence(f"sqlite:///{tmp_path / 'none.db'}") == ""


def test_nothing_is_made_where_only_to_look(tmp_path):
    with pytest.raises(Unreachable, match="is gone"):
        MlflowTracker(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path, create=False)
    assert list(tmp_path.iterdir()) == []
    tracker = MlflowTracker(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path)
    assert (tracker.find("s", STUDY.uid), tracker.models("s")) == ([], [])
    assert tracker._client.get_experiment_by_name("s") is None
    tracker.close()


def test_a_server_that_is_away_answers_fast(tmp_path):
    tracker = MlflowTracker("http://127.0.0.1:9", tmp_path)
    began = time.monotonic()
    with pytest.raises(Unreachable, match="does not answer now"):
        tracker.open_study("s", replace(STUDY, tags={}))
    assert time.monotonic() - began < 5


def test_a_second_name_or_a_copy(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("1")
    link(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "x").samefile(tmp_path / "a" / "x")
    (tmp_path / "a" / "y").write_text("2")
    (tmp_path / "b" / ".y.tmp").write_text("left by one that was killed")
    link(tmp_path / "a", tmp_path / "b")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["x", "y"]
    elsewhere = Path("/dev/shm")
    if elsewhere.is_dir() and elsewhere.stat().st_dev != tmp_path.stat().st_dev:
        target = elsewhere / f"hpo-{tmp_path.name}-{time.monotonic_ns()}"
        link(tmp_path / "a" / "x", target)
        assert target.read_text() == "1"
        target.unlink()


@pytest.mark.usefixtures("process")
def test_mlflow_is_imported_only_to_be_used(tmp_path):
    code = f"""
import sys, hpo.tracking.mirror_process, hpo.verify, hpo.tracking.ui.serve
from pathlib import Path
from hpo.tracking.base import Batch, Point, Run
from hpo.tracking.trackers import open_tracker
tracker = open_tracker("sqlite:///{tmp_path}/mlflow.db", Path("{tmp_path}/artifacts"))
run = tracker.open_study("s", Run("u", "s", 0, {{"hpo.run_uid": "u", "hpo.study": "s"}}))
tracker.send(run, Batch([Point("loss", 1, 2, 0.5)], texts={{"a.txt": "a"}}, status="FINISHED", ended_at=3))
tracker.flush()
assert tracker.find("s", "u")[0].status == "FINISHED"
tracker.close()
assert not {{'mlflow', 'torch', 'optuna', 'ray'}} & set(sys.modules), "a database of this host is written without it"
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


@pytest.mark.usefixtures("process")
def test_a_user_without_a_name_is_recorded_by_the_uid(tmp_path):
    """As in a container that is run under any uid: neither a passwd entry nor USER."""
    code = f"""
from pathlib import Path
from hpo.tracking.base import Run
from hpo.tracking.mlflow.tracker import MlflowTracker
tracker = MlflowTracker("sqlite:///{tmp_path}/mlflow.db", Path("{tmp_path}/artifacts"))
tracker.open_study("s", Run("u", "s", 0, {{"hpo.run_uid": "u", "hpo.study": "s"}}, "studies.mlp", "c0ffee"))
print(tracker.find("s", "u")[0].tags["mlflow.user"])
"""
    unnamed = {
        name: value for name, value in os.environ.items() if name not in ("USER", "LOGNAME", "LNAME", "USERNAME")
    }
    words = ["unshare", "--map-user=54321", sys.executable, "-c", code]
    ran = subprocess.run(words, env=unnamed, capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines()[-1:] == ["54321"], ran.stderr


def test_a_study_is_removed_and_another_of_its_name_stays(tracker, tmp_path):
    """Runs, models and files of one uid go, however often that is asked; of an empty experiment the name is free."""
    (tmp_path / "weights").write_bytes(b"\x00\x01")
    uids, parents = ("a" * 32, "b" * 32), []
    for uid in uids:
        run = Run(uid, "twice", 5, {"hpo.run_uid": uid, "hpo.study": "twice"})
        parents.append(tracker.open_study("twice", run))
        child = tracker.open_trial(
            parents[-1], replace(run, uid=f"{uid}/0", tags=run.tags | {"hpo.run_uid": f"{uid}/0"})
        )
        model = Model("m", 1, {"hpo.trial": "0"}, files={"weights": tmp_path / "weights"})
        tracker.send(
            child, Batch(files={"weights": tmp_path / "weights"}, models=[model], status="FINISHED", ended_at=9)
        )
    tracker.remove("twice", uids[0])
    tracker.remove("twice", uids[0])
    assert [len(tracker.find("twice", uid)) + len(tracker.find("twice", uid, children=True)) for uid in uids] == [0, 2]
    [left] = tracker.models("twice")
    assert tracker.model_digests(left.model_id).keys() == {"weights"}
    [child] = tracker.find("twice", uids[1], children=True)
    assert tracker.digests(child.run_id).keys() == {"weights"}
    tracker.remove("twice", uids[1])
    assert tracker.find("twice", uids[1]) == [] and tracker.models("twice") == []
    assert tracker.open_study("twice", Run(uids[0], "twice", 5, {"hpo.run_uid": uids[0], "hpo.study": "twice"}))
