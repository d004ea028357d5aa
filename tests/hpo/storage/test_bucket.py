"""Studies whose checkpoints lie in a bucket of a real S3 server, trained from homes that share no directory."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from driven import driven
from mirrored import ENVIRONMENT, ME, Made
from places import HARNESS
from sqlalchemy import select, update
from tiny_runs import PROMOTE, digest

import hpo as platform
from hpo.analysis.models.checkpoints import trained
from hpo.analysis.results.best import best_trials
from hpo.analysis.training.diagnose import Look, Subject, diagnosis
from hpo.clock import FakeClock, SystemClock
from hpo.driver.loop import Driver
from hpo.driver.request import request_of
from hpo.ledger import Ledger, leases, queries, transactions
from hpo.ledger.database.tables import attempts, checkpoints, events, studies, trials
from hpo.storage import artifacts, backup, gc, locations, metrics_json
from hpo.storage.home import Home
from hpo.storage.metrics_json import Results
from hpo.tracking import mirror_process
from hpo.tracking.mirror import MAX_PAUSE, Mirror
from hpo.tracking.mlflow.tracker import MlflowTracker
from hpo.verify import disk, verify
from hpo.verify.report import Report
from trainer.checkpoint.location import ObjectStore
from trainer.errors import CheckpointError
from trainer.files.s3 import Bucket

pytestmark = pytest.mark.whole

TINY = str(HARNESS / "tiny_study.py")
SECRETS = ("secret-of-s3", "AKIATESTKEY", "X-Amz-Signature")
RANKS = {"train.parallel.data": 2, "train.parallel.shard": "zero3", "train.micro_batch_size": 3, "pause": 0.0}
RANKS |= {"train.checkpoint.every_steps": 4}


def rows(ledger: Ledger, *columns, where=True) -> list[tuple]:
    query = select(*columns) if where is True else select(*columns).where(where)
    return [tuple(row) for row in ledger.look(lambda c: c.execute(query).all())]


def drive(
    storage: str, home: Home, bucket: str, after: int | None = None, *, bound: int = 6, then=None, **flags
) -> str:
    """Drive the tiny study in this process; the state it is left in, interrupted, or what is to be done `then`, `after`
    so many ticks."""
    ticks, options = 0, {"trials": bound, "checkpoints": bucket, "lease_timeout": 20}

    def tick(driver: Driver) -> None:
        nonlocal ticks
        ticks += 1
        if ticks == after:
            (then or driver.request_stop)()

    with closing(Ledger(storage)) as ledger:
        return driven(ledger, request_of(home.create(), reference=TINY, **flags), tick=tick, **options)[1]


def differences(ledger: Ledger, home: Home) -> list[str]:
    """Of the files against the ledger."""
    report = Report()
    disk.check(ledger, ledger.look(lambda c: queries.study_row(c, "tiny")), home, report)
    return [text for text in report.differences if "metrics.json" not in text]  # this driver writes none


@pytest.fixture
def promoted(tmp_path, bucket):
    """A study that was interrupted again and again, and went on each time from a home of its own."""
    storage, state, homes = f"sqlite:///{tmp_path / 'ledger.db'}", "interrupted", 0
    while state == "interrupted":
        home = Home(tmp_path / f"home-{homes}")
        state = drive(storage, home, bucket, 2, bound=4, **PROMOTE)
        homes += 1
        for area in ("checkpoints", "files"):
            left = [path for path in (home.root / area).rglob("*") if path.is_file() and path.name != "study.uid"]
            assert not left, "nothing of a trial is on the host that has trained it"
    assert state == "complete" and homes > 3
    ledger = Ledger(storage)
    yield ledger, Home(tmp_path / "another").create()
    ledger.close()


def test_a_restored_ledger_and_its_bucket_become_one_again(tmp_path, bucket):
    """The ledger of an early interruption comes back after the study has ended, and a new home resumes it."""
    ledger_file, storage = tmp_path / "ledger.db", f"sqlite:///{tmp_path / 'ledger.db'}"
    assert drive(storage, Home(tmp_path / "first"), bucket, 4, bound=4, **PROMOTE) == "interrupted"
    with closing(sqlite3.connect(ledger_file)) as ledger, closing(sqlite3.connect(tmp_path / "backup.db")) as copy:
        ledger.backup(copy)
    assert drive(storage, Home(tmp_path / "first"), bucket, bound=4, **PROMOTE) == "complete"
    with closing(Ledger(storage)) as ledger:
        ended = digest(ledger)
    for name in ("ledger.db-wal", "ledger.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    shutil.copy(tmp_path / "backup.db", ledger_file)
    with closing(Ledger(storage)) as ledger:
        assert differences(ledger, Home(tmp_path / "second")) != []
    assert drive(storage, Home(tmp_path / "second"), bucket, bound=4, **PROMOTE) == "complete"
    with closing(Ledger(storage)) as ledger:
        assert digest(ledger) == ended and differences(ledger, Home(tmp_path / "second")) == []


def test_a_backup_of_a_study_in_a_bucket_names_what_is_gone(promoted, tmp_path):
    ledger, home = promoted
    written = backup.write(ledger, home, ["tiny"], tmp_path / "backup")
    listed = backup.read(tmp_path / "backup")
    assert listed == written and [place.bucket for place in listed.places] != [""]
    assert backup.check(listed, home, ["tiny"]) == []
    dropped = gc.collect(ledger, home, "tiny", keep_best=1).dropped
    gone = backup.check(listed, home, ["tiny"])
    assert len(gone) == len(dropped) > 0 and {entry.kind for entry in gone} == {"checkpoint"}


def test_trials_that_pause_go_on_from_homes_that_share_no_directory(promoted, tmp_path):
    ledger, home = promoted
    assert drive(f"sqlite:///{tmp_path / 'golden.db'}", Home(tmp_path / "golden"), "", bound=4, **PROMOTE) == "complete"
    golden = Ledger(f"sqlite:///{tmp_path / 'golden.db'}")
    assert digest(ledger) == digest(golden), "as on a disk, never interrupted"
    golden.close()
    assert any(fence > 1 and at > 0 for at, fence in rows(ledger, attempts.c.from_step, attempts.c.fence))
    assert not {"restarted_from_scratch", "checkpoint_damaged"} & {kind for (kind,) in rows(ledger, events.c.kind)}
    assert differences(ledger, home) == []

    # What others do with checkpoints, from a home that has never seen the study.
    best = ledger.look(lambda c: best_trials(c, home, "tiny"))[0]
    assert best["checkpoint"].startswith("s3://checkpoints-") and best["missing_checkpoint"] is None
    found = ledger.look(lambda c: trained(c, home, "tiny", best["number"]))
    assert found.weights().keys() == {"0.weight", "0.bias", *(f"1.{name}" for name in BATCH_NORM), "3.weight", "3.bias"}

    # A byte that changes is noticed; what ended trials hold and nobody needs goes.
    at = Bucket(best["checkpoint"])
    raw = bytearray(at.get("model.safetensors") or b"")
    raw[-1] ^= 1
    (tmp_path / "harmed").write_bytes(raw)
    at.upload(tmp_path / "harmed", "model.safetensors")
    [difference] = differences(ledger, home)
    assert f"trial {best['number']}: checkpoint {Path(best['checkpoint']).name} is damaged: model.s" in difference
    says = rf"^checkpoint {best['checkpoint']} cannot be used: model\.safetensors has another sha256"
    with pytest.raises(CheckpointError, match=says):
        found.weights()
    study = platform.load("mlp")
    looked_at = Subject(
        "tiny", study, study.config, found.path, claim=object(), location=found.location, sha256=found.sha256
    )  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=says), diagnosis(looked_at, Look(1, 0, profile=False, pictures=False)):
        pass
    planned = gc.collect(ledger, home, "tiny", keep_best=1)
    kept = {row.path for row in planned.left}
    assert planned.dropped and kept == {
        path for path, state in rows(ledger, checkpoints.c.path, checkpoints.c.state) if state == "kept"
    }
    assert len(differences(ledger, home)) == 1, "nothing is left over in the bucket"


BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def start(*arguments: str, home: Path, storage: str) -> subprocess.Popen[str]:
    environ = os.environ | {"HPO_HOME": str(home)} | ({"HPO_STORAGE": storage} if storage else {})
    command = [sys.executable, "-m", "hpo", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)


def hpo(*arguments: str, home: Path, storage: str, code: int = 0) -> str:
    process = start(*arguments, home=home, storage=storage)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == code, output
    return output


def test_two_workers_without_a_common_directory_are_killed_and_resumed(tmp_path, bucket, postgres_database):
    """The one that drives has a worker here, another joins from a home of its own; then this home loses its files."""
    here, there, storage = tmp_path / "here", tmp_path / "there", postgres_database()
    flags = (
        "--study",
        TINY,
        "--trials",
        "6",
        "--window",
        "4",
        "-o",
        "pause=0.05",  # long enough to be joined
        "-o",
        "train.num_epochs=2",
        "-o",
        "train.checkpoint.every_steps=4",
        "--strategy",
        "none",
    )
    driver = start("run", *flags, "--workers", "1", "--checkpoints", bucket, home=here, storage=storage)
    ledger = eventually(lambda: Ledger(storage, create=False), Exception)
    eventually(lambda: rows(ledger, checkpoints.c.id)[0], IndexError)
    joined = start("worker", "--study", "tiny", home=there, storage=storage)
    eventually(lambda: [w for (w,) in set(rows(ledger, attempts.c.worker_id))][1], IndexError)
    eventually(lambda: rows(ledger, trials.c.id, where=trials.c.state == "complete")[0], IndexError)
    driver.send_signal(signal.SIGINT)
    said = [process.communicate(timeout=120)[0] for process in (driver, joined)]
    assert driver.returncode == 130, said
    for area in ("checkpoints", "files"):
        shutil.rmtree(here / area)
    shutil.rmtree(there)
    said.append(hpo("resume", "--study", "tiny", "--workers", "2", home=here, storage=storage))
    said.append(hpo("verify", "--study", "tiny", home=here, storage=storage))
    assert "0 differences" in said[-1]

    alone = f"sqlite:///{tmp_path / 'alone.db'}"
    drive(alone, Home(tmp_path / "alone"), "", window=4, strategy="none", overrides=BRIEF | {"train.num_epochs": 2})
    golden = Ledger(alone)
    assert digest(ledger) == digest(golden), "as on a disk, by one process that is never interrupted"
    golden.close()
    assert "restarted_from_scratch" not in [kind for (kind,) in rows(ledger, events.c.kind)]

    # Nobody is told who may use the bucket.
    told = "".join(said) + "".join(str(row) for table in TABLES for row in rows(ledger, *table.c))
    told += "".join(path.read_bytes().decode(errors="ignore") for path in here.rglob("*") if path.is_file())
    assert bucket in told and not [secret for secret in SECRETS if secret in told]
    ledger.close()


TABLES = attempts.metadata.sorted_tables


def eventually(ask, missing: type[Exception]):
    """What `ask` gives once it does not raise `missing` any more."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return ask()
        except missing:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_each_rank_puts_its_part_there_and_takes_from_there_what_it_holds(tmp_path, bucket, ranks):
    """The better of two trials waits at epoch 1, and goes on by ranks in another home."""
    storage = f"sqlite:///{tmp_path / 'ledger.db'}"
    flags = PROMOTE | {"sampler": "random", "overrides": RANKS | {"train.num_epochs": 2}}
    state, homes = "interrupted", 0
    while state == "interrupted":
        state, homes = drive(storage, Home(tmp_path / f"home-{homes}"), bucket, 2, bound=2, **flags), homes + 1
    assert state == "complete" and homes > 1
    ledger, home = Ledger(storage), Home(tmp_path / "another").create()
    went_on = rows(ledger, attempts.c.from_step, attempts.c.outcome, attempts.c.fence)
    assert [at > 0 for at, outcome, fence in went_on if fence > 1 and outcome == "complete"] == [True]
    assert not {"restarted_from_scratch", "checkpoint_damaged"} & {kind for (kind,) in rows(ledger, events.c.kind)}
    for number in (0, 1):
        found = ledger.look(lambda c, number=number: trained(c, home, "tiny", number))
        parts = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "manifest.json"}
        assert parts < found.location.files(found.path)
        assert found.weights().keys() >= {"0.weight", "3.bias"}
    assert differences(ledger, home) == []
    ledger.close()


def test_a_server_that_goes_away_ends_the_run_and_costs_no_checkpoint(tmp_path, bucket, monkeypatch):
    storage, home = f"sqlite:///{tmp_path / 'ledger.db'}", Home(tmp_path / "home")
    flags = {"bound": 2, "sampler": "random", "strategy": "none", "overrides": {"pause": 0.0}}
    with monkeypatch.context() as away, pytest.raises(CheckpointError, match=r"s3://.* cannot be reached \(no conn"):
        drive(storage, home, bucket, 1, then=lambda: away.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9"), **flags)
    assert drive(storage, home, bucket, **flags) == "complete"
    ledger = Ledger(storage)
    assert not {"restarted_from_scratch", "checkpoint_damaged"} & {kind for (kind,) in rows(ledger, events.c.kind)}
    assert differences(ledger, home) == []
    ledger.close()


def test_a_study_stays_where_it_was_begun(tmp_path, bucket):
    flags = {"bound": 1, "sampler": "random", "strategy": "none", "overrides": {"pause": 0.0, "train.num_epochs": 1}}
    drive(f"sqlite:///{tmp_path / 'ledger.db'}", Home(tmp_path / "home"), bucket, **flags)
    there = {"home": tmp_path / "home", "storage": f"sqlite:///{tmp_path / 'ledger.db'}"}
    said = hpo("run", "--study", TINY, "--trials", "2", "--checkpoints", f"{bucket}/on", **there, code=2)
    assert f"was begun with its checkpoints in {bucket}, and they stay there" in said
    tune = ("--name", "new", "--trials", "2", "--executor", "ray-tune", "--checkpoints", bucket)
    tuned = hpo("run", "--study", TINY, *tune, **there, code=2)
    assert "--checkpoints with --executor ray-tune: Tune keeps checkpoints of its own" in tuned


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("s3://nowhere-at-all/x", "s3://nowhere-at-all/x cannot be used: the bucket does not exist at AWS"),
        ("http://host/x", "'http://host/x' is not a place for checkpoints: give s3://BUCKET/PREFIX"),
        ("s3://key:secret-of-s3@host/x", "'s3://key:***@host/x' is not a place"),
    ],
)
def test_an_unusable_place_is_refused_before_anything_is_written(place, says, bucket, tmp_path):
    said = hpo("run", "--study", TINY, "--trials", "1", "--checkpoints", place, home=tmp_path / "h", storage="", code=2)
    assert says in said and said.count("\n") == 1 and "secret" not in said
    assert not (tmp_path / "h").exists()


def test_a_damaged_checkpoint_is_told_of_by_its_address(tmp_path, bucket):
    """Of two trials the better one waits at epoch 1, and goes on when its newest checkpoint has lost a byte."""
    storage, flags = f"sqlite:///{tmp_path / 'ledger.db'}", PROMOTE | {"sampler": "random"}
    flags["overrides"] = {"pause": 0.0, "train.num_epochs": 2}
    ledger, newest = Ledger(storage), {}
    while len(newest) < 2:
        assert drive(storage, Home(tmp_path / "home"), bucket, 1, bound=2, **flags) == "interrupted"
        newest = dict(rows(ledger, checkpoints.c.trial_id, checkpoints.c.path, where=checkpoints.c.state == "kept"))
    study = ledger.look(lambda c: queries.study_row(c, "tiny"))
    numbers = dict(rows(ledger, trials.c.id, trials.c.number))
    addresses = [
        f"{bucket}/tiny.{study.uid}/checkpoints/tiny/{numbers[trial]:05d}/{path}" for trial, path in newest.items()
    ]
    for at in map(Bucket, addresses):
        (tmp_path / "harmed").write_bytes((at.get("model.safetensors") or b"")[:-1])
        at.upload(tmp_path / "harmed", "model.safetensors")
    assert drive(storage, Home(tmp_path / "another"), bucket, bound=2, **flags) == "complete"
    told = [fields["path"] for (fields,) in rows(ledger, events.c.fields, where=events.c.kind == "checkpoint_damaged")]
    assert told and {path.removesuffix(".corrupt") for path in told} <= set(addresses)
    ledger.close()


@pytest.fixture
def handed_over(tmp_path, bucket, empty_mlflow):
    """A study in a bucket with two trials, of which the first has handed over a file; and the clock of its mirror."""
    home = Home(tmp_path / "home").create()
    shutil.copyfile(empty_mlflow, home.root / "mlflow.db")
    made = Made(home)
    with made.ledger.write() as connection:
        connection.execute(update(studies).values(environment=ENVIRONMENT | {"checkpoints": bucket}))
    made.ask(2)
    first, second = made.claim(), made.claim()
    place = locations.of(home, made.ledger.look(lambda c: queries.study_row(c, "s")))
    (tmp_path / "notes.txt").write_text("seen")
    where = artifacts.store(home.files("s", 0), first.fence, tmp_path / "notes.txt", "notes.txt", place)
    told = {"path": "notes.txt", "stored": where}
    made.ledger.transact(lambda c: transactions.record(c, first, "artifact", told, "0" * 32))
    for taken in (first, second):
        made.report(taken, 1, {"val/loss": 1.0}, epoch=1)
    tracker, clock = MlflowTracker(home.tracking_uri, home.artifacts), FakeClock()
    lease = leases.acquire(made.ledger, f"mirror:{made.id}", "s", ME, SystemClock(), 60)
    yield made, first, tracker, clock, Mirror(made.ledger, tracker, "s", home, lease, clock)
    tracker.close()
    made.ledger.close()


def shown(made: Made, tracker: MlflowTracker) -> dict[int, tuple[list[int], list[str]]]:
    """Trial -> the steps of its loss, and its files, in MLflow."""
    runs = tracker.find("s", made.uid, children=True)
    points = list(tracker.points(runs))
    return {
        int(run.uid.partition("/")[2]): (
            sorted(point.step for of, point in points if (of, point.key) == (run.run_id, "val/loss")),
            sorted(tracker.digests(run.run_id).keys() - {"config.json"}),
        )
        for run in runs
    }


def test_metrics_flow_on_while_the_bucket_is_away_and_files_follow(handed_over, monkeypatch, capsys):
    made, first, tracker, clock, mirroring = handed_over
    fetch, asked = ObjectStore.here, []

    def here(self: ObjectStore, path: Path) -> Path:
        asked.append(made.ledger.engine.pool.checkedout())
        return fetch(self, path)

    monkeypatch.setattr(ObjectStore, "here", here)
    with monkeypatch.context() as away:
        away.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        mirroring.look()
        assert shown(made, tracker) == {0: ([1], []), 1: ([1], [])}
        sent = mirroring.sent
        mirroring.look()
        assert mirroring.sent == sent, "nothing is new"
        made.report(first, 2, {"val/loss": 0.5}, epoch=2)
        mirroring.look()
        assert shown(made, tracker) == {0: ([1, 2], []), 1: ([1], [])}
        clock.sleep(MAX_PAUSE)
        mirroring.look()
        ended = mirroring.follow(lambda: True, 2.0, clock.sleep)
        assert ended.behind > 0 and "s3://" in ended.why and "no connection to its endpoint can be made" in ended.why
    said = capsys.readouterr().out
    assert said.count("files that trials have handed over cannot be fetched: s3://") == 1
    assert asked and not any(asked), "no connection of the ledger's waits for a bucket"
    clock.sleep(MAX_PAUSE)
    mirroring.look()
    assert shown(made, tracker) == {0: ([1, 2], ["files/notes.txt"]), 1: ([1], [])}
    assert mirror_process.behind(made.ledger, tracker.name, "s") == 0


def test_files_of_another_drivers_home_are_looked_for_there(tmp_path, bucket, empty_mlflow):
    storage, begun, later, never = f"sqlite:///{tmp_path / 'ledger.db'}", *(Home(tmp_path / name) for name in "abc")
    ledger = Ledger(storage)
    for bound, home in ((1, begun), (2, later)):
        drive(storage, home, bucket, bound=bound, sampler="random", strategy="none", overrides=BRIEF)
        Results(ledger, "tiny", home).write()
    (tmp_path / "page.html").touch()
    study = ledger.look(lambda c: queries.study_row(c, "tiny"))
    artifacts.leave(ledger, later.files("tiny", None), study.id, {"plots/page.html": tmp_path / "page.html"})
    shutil.copyfile(empty_mlflow, later.root / "mlflow.db")
    tracker = MlflowTracker(later.tracking_uri, later.artifacts)
    assert mirror_process.drain(ledger, tracker, "tiny", later).behind == 0
    tracker.close()

    def found(home: Home) -> list[str]:
        return verify(home, storage, later.tracking_uri, "tiny").differences

    assert found(later) == found(begun) == found(never.create()) == []
    metrics_json.path(begun, "tiny", 0).write_text("{}")
    assert ["does not say what the ledger does" in text for text in found(begun)] == [True]
    metrics_json.path(later, "tiny", 0).unlink()
    assert ["metrics.json is missing" in text for text in found(later)] == [True]
    ledger.close()


BRIEF = {"pause": 0.0, "train.num_epochs": 1}


@pytest.mark.slow  # a Ray is started for it, half a minute; what workers do with a bucket is tested above without
@pytest.mark.usefixtures("ray_of")
def test_workers_of_a_ray_of_this_host_use_the_bucket(tmp_path, bucket):
    flags = ("-o", "pause=0", "--window", "2", "--sampler", "random", "--trials", "2")
    alone = {"home": tmp_path / "alone", "storage": f"sqlite:///{tmp_path / 'alone.db'}"}
    hpo("run", "--study", TINY, *flags, "--executor", "inline", **alone)
    there = {"home": tmp_path / "home", "storage": f"sqlite:///{tmp_path / 'ledger.db'}"}
    hpo("run", "--study", TINY, *flags, "--executor", "ray", "--workers", "1", "--checkpoints", bucket, **there)
    assert "0 differences" in hpo("verify", "--study", "tiny", **there)
    ledger, golden = Ledger(there["storage"]), Ledger(alone["storage"])
    assert digest(ledger) == digest(golden)
    kept = {path for (path,) in rows(ledger, checkpoints.c.path, where=checkpoints.c.state == "kept")}
    assert kept and not list((tmp_path / "home" / "checkpoints").rglob("*.safetensors"))
    for opened in (ledger, golden):
        opened.close()
