"""What a tracker besides MLflow must do: nothing stands twice, whatever is sent again and wherever a file is cut."""

from __future__ import annotations

import math
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import shown
from rounds import rounds

from hpo.errors import UserError
from hpo.testing import check_tracker
from hpo.tracking import trackers
from hpo.tracking.base import Batch, Point, Refused, Run, Unreachable
from hpo.tracking.run_folders import RECORD, FolderTracker
from hpo.tracking.tensorboard import FILE
from hpo.tracking.wandb_offline import POINTS, RUNS, run_id

FILES = {"tensorboard": FILE, "wandb": POINTS}  # where the points of a run stand
STUDY = Run("u" * 32, "s", 1_700_000_000_000, {"hpo.run_uid": "u" * 32, "hpo.study": "s"})


def trial(number: int) -> Run:
    uid = f"{STUDY.uid}/{number}"
    return Run(uid, f"s-{number:04d}", 1_700_000_001_000, {"hpo.run_uid": uid, "hpo.study": "s"})


def test_every_tracker_is_bound():
    assert FILES.keys() == trackers.TRACKERS.keys()


@pytest.fixture(params=sorted(FILES))
def uri(request, tmp_path) -> str:
    return f"{request.param}:{tmp_path / 'shown'}"


def opened(uri: str) -> FolderTracker:
    """As another process opens it."""
    tracker = trackers.open_tracker(uri, Path("nowhere"))
    assert isinstance(tracker, FolderTracker) and not tracker.keeps_files
    return tracker


def test_it_keeps_the_promises_for_trackers(uri):
    check_tracker(uri)


def stored(tracker: FolderTracker) -> list[Point]:
    return [point for _, point in tracker.points(tracker.find("s", STUDY.uid, children=True))]


def test_runs_are_found_by_uid_and_stay_what_they_are(uri):
    tracker = opened(uri)
    assert tracker.find("s", STUDY.uid) == []
    parent = tracker.open_study("s", STUDY)
    child = tracker.open_trial(parent, trial(0))
    for found in (tracker, opened(uri)):
        [study], [run] = found.find("s", STUDY.uid), found.find("s", STUDY.uid, children=True)
        assert (study.run_id, study.uid, study.status, study.ended_at) == (parent, STUDY.uid, "RUNNING", None)
        assert (run.run_id, run.uid, run.tags) == (child, f"{STUDY.uid}/0", trial(0).tags)
        assert len(run.run_id) <= 64, "what the ledger holds of a run's id"
    for status in ("SCHEDULED", "RUNNING", "FINISHED", "RUNNING"):
        ended = 5 if status == "FINISHED" else None
        tracker.send(child, Batch(status=status, ended_at=ended, tags={"hpo.state": status}))
        [run] = tracker.find("s", STUDY.uid, children=True)
        assert (run.status, run.ended_at, run.tags["hpo.state"]) == (status, ended, status)
    tracker.discard(child)
    tracker.discard(child)
    assert tracker.find("s", STUDY.uid, children=True) == []
    with pytest.raises(Refused, match="deleted there"):
        tracker.send(child, Batch(tags={"a": "b"}))


POINTS_SENT = [Point("val/loss", k, 1_700_000_002_000 + k, 0.5 * k) for k in range(40)]
ODD = [Point("odd", 1, 5, math.nan), Point("odd", 2, 5, math.inf), Point("odd", 3, 5, -math.inf)]


def test_a_batch_sent_twice_changes_nothing(uri, tmp_path):
    tracker = opened(uri)
    child = tracker.open_trial(tracker.open_study("s", STUDY), trial(0))
    batch = Batch([*POINTS_SENT, *ODD], {"lr": "0.1", "opt": "adamw"}, {"µ": "ß"}, status="FINISHED", ended_at=9)
    for again in (tracker, tracker, opened(uri)):
        again.send(child, replace(batch, points=POINTS_SENT[:7], status="RUNNING", ended_at=None))
        again.send(child, batch)
    assert sorted(map(repr, stored(opened(uri)))) == sorted(map(repr, batch.points))
    [view] = tracker.find("s", STUDY.uid, children=True)
    assert (view.params, view.tags["µ"], view.keys) == (batch.params, "ß", {"val/loss", "odd"})
    with pytest.raises(Refused, match=r"parameter lr is 0\.1 there and 0\.2 here"):
        tracker.send(child, Batch(params={"lr": "0.2"}))
    tracker.send(child, Batch(files={"gone": tmp_path / "gone"}, removed=["x"], removed_models=["y"]))
    assert (tracker.digests(child), tracker.models("s"), tracker.model_digests("m")) == ({}, [], {})


def test_a_file_cut_anywhere_is_gone_on_with(uri, tmp_path):
    """As a kill, a full disk or a power cut leaves it: what is whole stays, what is sent again stands once."""
    tracker = opened(uri)
    child = tracker.open_trial(tracker.open_study("s", STUDY), trial(0))
    points = POINTS_SENT[:3]
    tracker.send(child, Batch(points[:2], status="RUNNING"))
    file = next((tmp_path / "shown").rglob(FILES[tracker.name.partition(":")[0]]))
    half = file.stat().st_size
    tracker.send(child, Batch(points[2:]))
    whole = file.read_bytes()
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        again = opened(uri)
        before = stored(again)
        assert before == points[: len(before)] and (len(before) >= 2 or cut < half)
        again.send(child, Batch(points))
        assert stored(again) == points and stored(opened(uri)) == points, cut
    file.write_bytes(whole[:-3] + bytes(3))  # as a disk that lost its last block
    tracker.send(child, Batch(points))  # a process that went on meanwhile sees another file than it left
    opened(uri).send(child, Batch([*points, POINTS_SENT[3]]))
    assert stored(opened(uri)) == POINTS_SENT[:4]


def test_a_disk_that_is_full_in_the_middle_doubles_no_point(uri):
    """What was written whole before the disk was full is there, and the next send leaves it out."""
    tracker = opened(uri)
    child = tracker.open_trial(tracker.open_study("s", STUDY), trial(0))
    many = [Point("val/loss", k, 1_700_000_002_000 + k, 0.5 * k) for k in range(400)]
    tracker.send(child, Batch(many[:2]))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, before[1]))
    try:
        with pytest.raises(Unreachable, match="File too large"):
            tracker.send(child, Batch(many))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert 2 < len(stored(opened(uri))) < 400
    tracker.send(child, Batch(many))
    assert sorted(stored(tracker)) == many


def test_a_study_is_removed_without_reading_all_of_it_for_each_trial(uri, monkeypatch):
    tracker, read = opened(uri), list[Path]()
    record_in = FolderTracker._record_in
    monkeypatch.setattr(
        FolderTracker, "_record_in", lambda self, folder: read.append(folder) or record_in(self, folder)
    )
    parent = tracker.open_study("s", STUDY)
    for number in range(40):
        tracker.open_trial(parent, trial(number))
    for of in (tracker, opened(uri)):
        read.clear()
        of.remove("s", STUDY.uid)
        assert len(read) < 4 * 41, "a few looks at all of it, however many trials"
        assert of.find("s", STUDY.uid, children=True) == [] == of.find("s", STUDY.uid)


def test_files_of_that_name_that_are_of_others_are_left_alone(uri, tmp_path):
    theirs = {"sub": '{"search": [1, 2]}', "list": "[1]", "cut": '{"uid": "u'}
    for name, text in theirs.items():
        (tmp_path / "shown" / name).mkdir(parents=True)
        (tmp_path / "shown" / name / RECORD).write_text(text)
    parent = opened(uri).open_study("s", STUDY)
    child = opened(uri).open_trial(parent, trial(0))
    assert [view.run_id for view in opened(uri).find("s", STUDY.uid, children=True)] == [child]
    opened(uri).remove("s", STUDY.uid)
    assert {path.parent.name: path.read_text() for path in tmp_path.rglob(RECORD)} == theirs


def test_a_place_that_cannot_be_written_is_away(uri, tmp_path):
    tracker = opened(uri)
    child = tracker.open_trial(tracker.open_study("s", STUDY), trial(0))
    folder = next((tmp_path / "shown").rglob("s-0000"))
    shutil.rmtree(folder / FILES[tracker.name.partition(":")[0]], ignore_errors=True)
    (folder / FILES[tracker.name.partition(":")[0]]).mkdir()
    with pytest.raises(Unreachable, match=r"cannot be written now \(Is a directory\)"):
        tracker.send(child, Batch(POINTS_SENT))


# By the libraries' own readers


def test_tensorboard_reads_what_was_sent(tmp_path):
    tracker = opened(f"tensorboard:{tmp_path}")
    child = tracker.open_trial(tracker.open_study("s", STUDY), trial(0))
    tracker.send(child, Batch(POINTS_SENT[:20], {"lr": "0.1", "opt": "adamw"}))
    batch = Batch(POINTS_SENT, {"lr": "0.1", "opt": "adamw"}, status="FINISHED", ended_at=1_700_000_009_000)
    for again in (tracker, tracker, opened(f"tensorboard:{tmp_path}")):
        again.send(child, batch)
    found = shown.tensorboard(tmp_path / "s" / "s-0000")
    assert found == {(p.key, p.step): (p.timestamp / 1000, p.value) for p in POINTS_SENT}  # halves are exact in float32
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import api_pb2, metadata

    events = EventAccumulator(str(tmp_path / "s" / "s-0000")).Reload()
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    begun = metadata.parse_session_start_info_plugin_data(content)
    assert (begun.hparams["lr"].number_value, begun.hparams["opt"].string_value) == (0.1, "adamw")
    content = events.SummaryMetadata(metadata.SESSION_END_INFO_TAG).plugin_data.content
    ended = metadata.parse_session_end_info_plugin_data(content)
    assert (ended.status, ended.end_time_secs) == (api_pb2.STATUS_SUCCESS, 1_700_000_009.0)
    assert [len(events.Tensors(tag)) for tag in (metadata.SESSION_START_INFO_TAG, metadata.SESSION_END_INFO_TAG)] == [
        1,
        1,
    ]


@pytest.mark.usefixtures("process")
def test_wandb_has_one_run_for_each_trial_that_has_ended(tmp_path):
    tracker = opened(f"wandb:{tmp_path}")
    child = tracker.open_trial(tracker.open_study("s", STUDY), trial(0))
    batch = Batch([*POINTS_SENT, ODD[0]], {"lr": "0.1", "opt": "adamw"}, {"hpo.state": "complete"})
    tracker.send(child, batch)
    runs = tmp_path / "s" / RUNS
    assert not runs.exists()
    runs.mkdir()
    (runs / ".left.tmp").mkdir()  # by one that was killed
    ended = replace(batch, status="FINISHED", ended_at=1_700_000_009_000)
    tracker.send(child, ended)
    [run] = runs.iterdir()
    assert run.name == f"offline-run-{run_id(trial(0).uid)}"
    before = next(run.glob("*.wandb")).stat().st_ino
    opened(f"wandb:{tmp_path}").send(child, ended)
    assert next(run.glob("*.wandb")).stat().st_ino == before, "what is unchanged is not written again"
    found = shown.wandb(run)
    assert repr(found.pop(("odd", 1))[1]) == "nan"
    assert {key: value for key, (_, value) in found.items()} == {(p.key, p.step): p.value for p in POINTS_SENT}
    assert found["val/loss", 39][0] == pytest.approx(1_700_000_002.039)
    records = {record.WhichOneof("record_type"): record for record in shown.wandb_records(run)}
    sent = records["run"].run
    assert (sent.run_id, sent.project, sent.display_name, sent.run_group) == (run_id(trial(0).uid), "s", "s-0000", "s")
    assert {item.key: item.value_json for item in sent.config.update}.items() >= {"lr": "0.1", "opt": '"adamw"'}.items()
    assert records["exit"].exit.exit_code == 0


def test_wandb_uploads_nothing_of_a_trial_that_was_discarded(tmp_path):
    tracker = opened(f"wandb:{tmp_path}")
    child = tracker.open_trial(tracker.open_study("s", STUDY), trial(0))
    tracker.send(child, Batch(POINTS_SENT, {"lr": "0.1"}, status="FINISHED", ended_at=9))
    assert len([*tmp_path.glob(f"s/{RUNS}/*")]) == 1
    opened(f"wandb:{tmp_path}").discard(child)
    assert [*tmp_path.glob(f"s/{RUNS}/*")] == []


# Bad input


@rounds(
    ("text", "why"),
    [
        ("tensorboard", "is not known: give tensorboard:DIR, wandb:DIR or one of your own"),
        ("tensorboard:", "is not known"),
        ("sqlite:///x", "MLflow is set by --tracking-uri"),
        ("comet_nowhere:x", "the tracker 'comet_nowhere:x': module 'comet_nowhere' does not exist"),
        ("collections:Counter:x", "the tracker 'collections:Counter' has no method open_study"),
        ("hpo.tracking.tensorboard:TensorBoardTracker:/dev/null/x", "/dev/null is a file"),
        ("hpo.tracking.mlflow.tracker:MlflowTracker:https://me:pass@host/", "would be stored with a secret"),
        ("tensorboard:/dev/null/x", "/dev/null is a file: name a directory"),
    ],
)
def test_what_is_no_tracker_is_one_sentence(text, why):
    with pytest.raises(UserError, match=why):
        trackers.resolved(text)


def test_a_path_that_the_ledger_would_cut_is_refused(tmp_path):
    """By the cut one the directory would not be found again."""
    with pytest.raises(UserError, match=r"its path has \d+ characters, more than the ledger keeps: name another"):
        trackers.resolved(f"tensorboard:{tmp_path}/{'/'.join(['d' * 60] * 4)}")


def test_a_tracker_without_its_package_names_the_extra(monkeypatch, tmp_path):
    assert trackers.resolved(f"tensorboard:{tmp_path}/a/../b") == f"tensorboard:{tmp_path}/a/../b"
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs wandb: pip install 'hpo\[wandb\]'"):
        trackers.resolved("wandb:x")
