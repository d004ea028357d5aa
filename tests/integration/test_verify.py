"""`verify` finds each kind of difference, names it, and tells it from being behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from mirrored import ME, Made

from hpo import mirror
from hpo.clock import SystemClock
from hpo.errors import StorageError, StudyError
from hpo.home import Home
from hpo.ledger import leases, tables, writes
from hpo.ledger.process import Process, start_time
from hpo.tracking.mlflow import MlflowTracker
from hpo.verify import Report, verify

# MLflow 3.17 with SQLAlchemy 2.1.
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Iterator[Made]:
    """Three trials, one of them with a checkpoint and a file, all mirrored."""
    study = Made(Home.at(tmp_path_factory.mktemp("verified") / "home"))
    study.ask()
    taken = study.claim()
    study.report(taken, 1, {"val/loss": 0.1 + 0.2}, epoch=1, checkpoint=study.checkpoint(taken, 1))
    study.artifact(taken, "notes.txt", "seen")
    study.finish(taken, "complete", 1, [0.1 + 0.2])
    study.complete(2)
    study.complete(2)
    sync(study)
    yield study
    study.ledger.close()


def sync(made: Made) -> None:
    tracker = MlflowTracker(made.home.tracking_uri, made.home.artifacts)
    assert mirror.drain(made.ledger, tracker, made.name, made.home).behind == 0
    tracker.close()


def checked(made: Made) -> Report:
    return verify(made.home, made.home.storage, made.home.tracking_uri, made.name)


@contextlib.contextmanager
def database(path: Path, *statements: str) -> Iterator[None]:
    """The database with these statements run; as it was afterwards."""
    copy = path.with_suffix(".copy")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute(f"VACUUM INTO '{copy}'")
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    try:
        yield
    finally:
        with contextlib.closing(sqlite3.connect(copy)) as old, contextlib.closing(sqlite3.connect(path)) as new:
            old.backup(new)
        copy.unlink()


def test_a_sound_home(made):
    report = checked(made)
    assert (report.differences, report.behind) == ([], 0)
    assert report.counts == {
        "studies": 1,
        "trials": 3,
        "attempts": 3,
        "reports": 1 + 2 * 2 * 3,
        "checkpoints": 1,
        "runs": 4,
        "points": 3 + 2 * (2 * 3 + 2 + 1),
        "artifacts": 2 + 2 + 2,
    }


IN_MLFLOW = {
    "UPDATE params SET value = '0.2' WHERE key = 'train.optim.lr'": "has the params",
    "DELETE FROM params WHERE key = 'opt'": "has the params",
    "DELETE FROM metrics WHERE key = 'val/m1' AND step = 2": "lacks val/m1",
    "UPDATE metrics SET value = value + 1e-16 * 8 WHERE key = 'val/loss'": "lacks val/loss = 0.30000000000000004",
    "UPDATE metrics SET timestamp = timestamp + 1 WHERE key = 'epoch'": "lacks epoch",
    "INSERT INTO metrics SELECT key, value, timestamp, run_uuid, step + 9, is_nan FROM metrics": "the ledger has not",
    "UPDATE runs SET status = 'RUNNING' WHERE status = 'FINISHED'": "has the status RUNNING",
    "UPDATE runs SET end_time = end_time + 1": "has the ended_at",
    "UPDATE tags SET value = 'pruned' WHERE key = 'hpo.state'": "has the tags",
    "UPDATE runs SET lifecycle_stage = 'deleted' WHERE name = 's-0001'": "is not in MLflow",
    "UPDATE runs SET lifecycle_stage = 'deleted' WHERE name = 's'": "for the study",
}


@pytest.mark.parametrize("statement", IN_MLFLOW)
def test_what_differs_in_mlflow(made, statement):
    with database(made.home.root / "mlflow.db", statement):
        report = checked(made)
        assert any(IN_MLFLOW[statement] in text for text in report.differences), report.differences
        assert report.behind == 0


IN_LEDGER = {
    "UPDATE trials SET number = 7 WHERE number = 2": "numbers are not 0 to 2",
    "DELETE FROM asks WHERE trial_id = 2": "has no ask",
    "UPDATE reports SET fence = 5 WHERE trial_id = 1": "a report of fence 5, above its own 1",
    "UPDATE trials SET ended_at = NULL WHERE number = 1": "trial 1 is complete, and its end is None",
    "UPDATE trials SET state = 'lost' WHERE number = 1": "in no known state: 'lost'",
    "UPDATE attempts SET outcome = NULL WHERE trial_id = 3": "its attempt 1 has not ended",
    "UPDATE trials SET state = 'running', ended_at = NULL WHERE number = 2": "is running without an attempt",
    "DELETE FROM trials WHERE number = 2": "points to no row of trials",
}


@pytest.mark.parametrize("statement", IN_LEDGER)
def test_what_breaks_the_ledgers_own_rules(made, statement):
    with database(made.home.root / "ledger.db", statement):
        assert any(IN_LEDGER[statement] in text for text in checked(made).differences), checked(made).differences


def test_checkpoints_on_disk(made):
    root = made.home.checkpoints("s", 0)
    [kept] = root.iterdir()
    for damage, text in (
        (lambda path: flip(path / "model.safetensors"), "model.safetensors of checkpoint"),
        (lambda path: (path / "model.safetensors").unlink(), "lacks model.safetensors"),
        (lambda path: flip(path / "manifest.json"), "is not the one that was committed"),
        (lambda path: shutil.rmtree(path), "is missing"),
        (lambda path: shutil.copytree(path, root / "step-00000002.f1.abc"), "no checkpoint that the ledger keeps"),
        (lambda path: (root / "step-00000002.f1.abc.tmp").mkdir(), "a leftover temporary directory"),
    ):
        shutil.copytree(root, made.home.root / "safe")  # other inodes: what the mirror linked stays as it is
        damage(kept)
        found = checked(made).differences
        assert any(text in difference for difference in found), (text, found)
        shutil.rmtree(root)
        (made.home.root / "safe").rename(root)
    assert checked(made).differences == []


def flip(path: Path) -> None:
    """Change one bit, in another inode than the mirror's link to the same file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)


def test_artifacts(made):
    [run] = [path for path in made.home.artifacts.rglob("checkpoints") if path.is_dir()]
    weights = run / "step-00000001/model.safetensors"
    original = weights.read_bytes()
    flip(weights)
    assert [t for t in checked(made).differences if "MLflow has another checkpoints/step-00000001/model" in t]
    weights.unlink()
    assert [t for t in checked(made).differences if "MLflow lacks checkpoints/step-00000001/model" in t]
    weights.write_bytes(original)
    (run / "extra").write_text("")
    assert [t for t in checked(made).differences if "MLflow still has checkpoints/extra" in t]
    (run / "extra").unlink()
    assert checked(made).differences == []


def dead() -> Process:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    gone = Process(ME.host, child.pid, start_time(child.pid) or "")
    child.kill()
    child.communicate()
    return gone


def test_what_the_dead_have_left(tmp_path):
    made = Made(Home.at(tmp_path / "home"))
    gone = dead()
    made.ledger.transact(lambda connection: writes.register(connection, gone, "local"))
    made.ask()
    made.ledger.transact(lambda connection: writes.claim(connection, gone.id))
    leases.acquire(made.ledger, f"mirror:{made.id}", gone, SystemClock(), 1.0)
    sync(made)  # takes the lease of the dead
    assert checked(made).differences == [
        "s: trial 0 is running, but its worker is dead: `hpo resume` takes it up again"
    ]
    lease = leases.acquire(made.ledger, f"driver:{made.id}", gone, SystemClock(), 1.0)
    assert any("driver's lease is held by a dead process" in t for t in checked(made).differences)
    lease.release()
    # Beside a live driver it is the driver's business.
    leases.acquire(made.ledger, f"driver:{made.id}", ME, SystemClock(), 1.0)
    (made.home.checkpoints("s", 0) / "step-00000001.f1.a.tmp").mkdir(parents=True)
    assert checked(made).differences == []
    made.ledger.close()


def test_behind_is_not_different(made, tmp_path):
    study = Made(Home.at(tmp_path / "home"))
    taken = study.complete(2)
    sync(study)
    study.ask()
    second = study.claim()
    study.report(second, 1, {"val/loss": 1.0})
    study.ledger.transact(lambda c: writes.note(c, study.id, "drift", {}, os.urandom(8).hex()))
    report = checked(study)
    assert (report.differences, report.behind) == ([], 3 + 1)
    assert taken.number == 0
    with study.ledger.write() as connection:
        connection.execute(sa.update(tables.trials).where(tables.trials.c.number == 0).values(state="pruned"))
    assert [t for t in checked(study).differences if "trial 0" in t]
    study.ledger.close()


def test_what_cannot_be_opened(made, tmp_path):
    with pytest.raises(StorageError, match="there is no ledger"):
        verify(Home.at(tmp_path), f"sqlite:///{tmp_path / 'none.db'}", made.home.tracking_uri)
    with pytest.raises(StudyError, match="no study 'x'"):
        verify(made.home, made.home.storage, made.home.tracking_uri, "x")
    away = "http://127.0.0.1:9"
    report = verify(made.home, made.home.storage, away)
    assert (report.differences, report.behind) == ([], 1 + 3 * 5)  # nothing was ever sent there
    with database(made.home.root / "ledger.db", f"UPDATE mirrors SET tracker = '{away}'"):
        report = verify(made.home, made.home.storage, away)
    assert len(report.differences) == 1 and "cannot be used now" in report.differences[0]
