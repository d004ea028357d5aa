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
from mirrored import ME, Made, sync
from places import HARNESS
from rounds import rounds
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.clock import SystemClock
from hpo.errors import NoLedger, StudyError
from hpo.ledger import Ledger, claims, leases, queries, transactions, worker_rows
from hpo.ledger.database import tables
from hpo.ledger.process_id import Process, start_time
from hpo.storage.home import Home
from hpo.tracking import mirror_process
from hpo.tracking.mlflow.tracker import MlflowTracker
from hpo.tracking.trackers import lease_of
from hpo.verify import Report, verify

pytestmark = pytest.mark.whole


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
    study.end()
    sync(study)
    yield study
    study.ledger.close()


def checked(made: Made) -> Report:
    return verify(made.home, made.home.storage, made.home.tracking_uri, made.name)


def test_a_home_may_be_moved(made, tmp_path):
    there, root = Home.at(tmp_path / "there"), made.home.root
    shutil.copytree(root, there.root)
    root.rename(tmp_path / "hidden")
    try:
        ledger = Ledger(there.storage)
        tracker = MlflowTracker(there.tracking_uri, there.artifacts)
        assert mirror_process.drain(ledger, tracker, made.name, there).behind == 0
        tracker.close()
        ledger.close()
        report = verify(there, there.storage, there.tracking_uri, made.name)
        assert (report.differences, report.behind) == ([], 0)
        assert not root.exists()
    finally:
        (tmp_path / "hidden").rename(root)


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
        "artifacts": 1 + 5 + 2 + 2,
        "models": 1,
        "files": 1,
    }


def of(run: str) -> str:
    return f"run_uuid = (SELECT run_uuid FROM runs WHERE name = '{run}')"


LOSS = "key, value, {}, run_uuid, {}, is_nan FROM metrics WHERE key = 'val/loss'"
IN_MLFLOW = {
    "UPDATE params SET value = '0.2' WHERE key = 'train.optim.lr' AND value = '0.1'": "trial 0: MLflow has the params",
    f"DELETE FROM params WHERE key = 'opt' AND {of('s-0001')}": "trial 1: MLflow has the params",
    f"DELETE FROM metrics WHERE key = 'val/m1' AND step = 2 AND {of('s-0002')}": "trial 2: MLflow lacks val/m1 = 1.5",
    f"INSERT INTO metrics SELECT {LOSS.format('timestamp', 'step + 9')}": "the ledger has not",
    f"INSERT INTO metrics SELECT {LOSS.format('timestamp + 1', 'step')}": "the ledger has not",
    "UPDATE runs SET status = 'RUNNING' WHERE name = 's-0001'": "trial 1: MLflow has the status RUNNING",
    "UPDATE runs SET end_time = end_time + 1 WHERE name = 's-0001'": "trial 1: MLflow has the end",
    f"UPDATE tags SET value = 'pruned' WHERE key = 'hpo.state' AND {of('s-0001')}": "trial 1: MLflow has the tag",
    "UPDATE runs SET lifecycle_stage = 'deleted' WHERE name = 's-0001'": "is not in MLflow",
    "UPDATE runs SET lifecycle_stage = 'deleted' WHERE name = 's'": "for the study",
    "UPDATE runs SET status = 'RUNNING' WHERE name = 's'": "the study: MLflow has the status RUNNING",
    "UPDATE runs SET end_time = 1 WHERE name = 's'": "the study: MLflow has the end 1",
    f"UPDATE tags SET value = 'x' WHERE key = 'hpo.spec.sampler' AND {of('s')}": "the tag hpo.spec.sampler x",
    f"DELETE FROM tags WHERE key = 'hpo.best.trial' AND {of('s')}": "the study: MLflow has the tag hpo.best.trial",
    "UPDATE logged_models SET lifecycle_stage = 'deleted'": "trial 0: MLflow has the models []",
    "UPDATE logged_models SET status = 1": "model trial-0000-step-00000001 is not finished",
    "UPDATE logged_model_metrics SET metric_value = 1": "the metrics of MLflow's model",
    "UPDATE logged_model_tags SET tag_value = '9' WHERE tag_key = 'hpo.step'": "the tags of MLflow's model",
}


@rounds("statement", IN_MLFLOW)
def test_what_differs_in_mlflow(made, statement):
    with database(made.home.root / "mlflow.db", statement):
        report = checked(made)
        assert len(report.differences) == 1 and IN_MLFLOW[statement] in report.differences[0], report.differences
        assert report.behind == 0


@pytest.fixture
def told(tmp_path) -> Iterator[Made]:
    """A study brought to its end, one of its trials pruned; never mirrored."""
    study = Made(Home.at(tmp_path / "home"))
    study.complete(2)
    study.ask()
    taken = study.claim()
    study.report(taken, 1, {"val/loss": 1.0}, epoch=1, stop="third of 3")
    study.finish(taken, "pruned")
    study.complete(2)
    study.end()
    assert checked(study).differences == []
    yield study
    study.ledger.close()


IN_LEDGER = {
    "UPDATE trials SET number = 7 WHERE number = 2": "numbers are not 0 to 2",
    "DELETE FROM asks WHERE trial_id = 2": "trial 1 has no ask",
    "UPDATE reports SET fence = 5 WHERE trial_id = 1": "a report of fence 5, above its own 1",
    "UPDATE trials SET ended_at = NULL WHERE number = 1": "trial 1 is pruned, and its end is None",
    "UPDATE trials SET state = 'lost' WHERE number = 1": "in no known state: 'lost'",
    "UPDATE attempts SET outcome = NULL WHERE trial_id = 3": "its attempt 1 has not ended",
    "UPDATE trials SET told = NULL WHERE number = 2": "trial 2 was never told to the sampler",
    "UPDATE trials SET told = 5 WHERE number = 2": "places of the tells are not 0 to 2: [0, 1, 5]",
    "UPDATE studies SET requested = 4": "complete with 3 trials, and 4 were requested",
    "UPDATE decisions SET step = 9": "trial 1 has a decision at step 9, but no report there",
    "UPDATE decisions SET verdict = 'continue'": "trial 1 is pruned, but no decision stopped or paused it",
}


@rounds("statement", IN_LEDGER)
def test_what_breaks_the_ledgers_own_rules(told, statement):
    with database(told.home.root / "ledger.db", statement):
        found = checked(told).differences
        assert len(found) == 1 and IN_LEDGER[statement] in found[0], found


def test_an_open_study(tmp_path):
    study = Made(Home.at(tmp_path / "home"))
    study.ask()
    study.claim()
    path = study.home.root / "ledger.db"
    with database(path, "UPDATE trials SET told = 0"):
        [found] = checked(study).differences
        assert "trial 0 is running, but the sampler was told of its end" in found
    with database(path, "DELETE FROM attempts"):
        [found] = checked(study).differences
        assert "trial 0 is running without an attempt" in found
    with database(path, "UPDATE studies SET state = 'complete', requested = 1"):
        [found] = checked(study).differences
        assert "trial 0 is running, but the study is complete" in found
    with database(path, "DELETE FROM trials"):
        assert any("points to no row of trials" in text for text in checked(study).differences)
    study.ledger.close()


BEST = {
    "UPDATE checkpoints SET best = 1 WHERE step = 1": "has 2 best checkpoints",
    "UPDATE checkpoints SET best = (step = 1)": "by val/loss the best checkpoint is step-00000002",
    "UPDATE checkpoints SET best = 0": "by val/loss the best checkpoint is step-00000002",
    "UPDATE checkpoints SET best = (step = 4)": "not step-00000004",  # NaN
    "UPDATE checkpoints SET best = (step = 3)": "not step-00000003",  # as good, and later
}


def test_the_best_checkpoint(tmp_path):
    study = Made(Home.at(tmp_path / "home"))
    study.ask(train={"checkpoint": {"monitor": "val/loss", "mode": "min"}})
    taken = study.claim()
    for step, value in enumerate((0.9, 0.1, 0.1, float("nan")), 1):
        study.report(taken, step, {"val/loss": value}, epoch=step, checkpoint=study.checkpoint(taken, step))
    with study.ledger.write() as connection:
        connection.execute(
            sa.update(tables.checkpoints).values(best=sa.cast(tables.checkpoints.c.step == 2, sa.Integer))
        )
    study.finish(taken, "complete", 4, [0.1])
    assert checked(study).differences == []
    for statement, words in BEST.items():
        with database(study.home.root / "ledger.db", statement):
            found = checked(study).differences
            assert len(found) == 1 and words in found[0], (statement, found)
    study.ledger.close()


def test_checkpoints_on_disk(made):
    root = made.home.checkpoints("s", 0)
    [kept] = (path for path in root.iterdir() if path.is_dir())
    for damage, text in (
        (lambda path: flip(path / "model.safetensors"), "model.safetensors has another sha256"),
        (lambda path: (path / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda path: flip(path / "manifest.json"), "another sha256 than the one committed"),
        (
            lambda path: shutil.copytree(path, root / "step-00000002.f1.abc"),
            "no checkpoint the ledger keeps: `hpo repair --study s` removes it",
        ),
        (
            lambda path: (root / "step-00000002.f1.abc.tmp").mkdir(),
            "left over by a killed process: `hpo gc --study s` removes it",
        ),
        (lambda path: (root / "metrics.json").unlink(), "metrics.json is missing: `hpo resume --study s` writes it"),
        (lambda path: (root / "metrics.json").write_text("{}"), "metrics.json does not say what the ledger does"),
        (lambda path: (root.parent / "00009").mkdir(), "00009 belongs to no trial: `hpo repair --study s` removes it"),
        (lambda path: (root.parents[1] / "gone").mkdir(), "gone belongs to no study"),
    ):
        shutil.copytree(root.parents[1], made.home.root / "safe")  # other inodes: what the mirror linked stays
        damage(kept)
        found = [each for each in checked(made).differences if "MLflow" not in each]
        assert len(found) == 1 and text in found[0], (text, found)
        shutil.rmtree(root.parents[1])
        (made.home.root / "safe").rename(root.parents[1])
    assert checked(made).differences == []


def test_artifacts_on_disk_and_leftovers(made):
    files = made.home.files("s", 0)
    content = (files / "notes.txt").read_bytes()
    for path, text in (
        (files / "stray.txt", "stray.txt is no artifact of any event: move it elsewhere"),
        (files / "notes.txt.0a.tmp", "left over by a killed process"),
        (files.parent / "00007", "belongs to no trial"),
        (made.home.root / "x.tmp", "left over by a killed process"),
        (made.home.root / "mlflow.db.new-wal", "left over by a killed process"),
    ):
        path.write_text("")
        [found] = checked(made).differences
        assert text in found and str(path) in found
        path.unlink()
    (files / "notes.txt").unlink()
    found = [each for each in checked(made).differences if "MLflow" not in each]
    assert len(found) == 1 and "notes.txt is missing" in found[0]
    (files / "notes.txt").write_bytes(content)
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
    (run / "mine").write_text("")
    assert checked(made).differences == [], "what somebody has added has no name of a checkpoint"
    (run / "step-00000009").mkdir()
    (run / "step-00000009" / "model.safetensors").write_text("")
    assert [t for t in checked(made).differences if "MLflow still has checkpoints/step-00000009/model" in t]
    shutil.rmtree(run / "step-00000009")
    assert checked(made).differences == []


def dead() -> Process:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    gone = Process(ME.host, child.pid, start_time(child.pid) or "")
    child.kill()
    child.communicate()
    return gone


@pytest.mark.usefixtures("process")
def test_what_the_dead_have_left(tmp_path):
    made = Made(Home.at(tmp_path / "home"))
    gone = dead()
    made.ledger.transact(lambda connection: worker_rows.register(connection, gone, "local"))
    made.ask()
    made.ledger.transact(lambda connection: claims.claim(connection, gone.id, "t", [made.id]))
    leases.acquire(made.ledger, f"mirror:{made.id}", "s", gone, SystemClock(), 1.0)
    sync(made)  # takes the lease of the dead
    assert checked(made).differences == [
        "s: trial 0 is running, but its worker is dead: `hpo resume --study s` takes it up again"
    ]
    with made.ledger.write() as connection:
        environment = queries.study_row(connection, "s").environment | {"trackers": ["tensorboard:/shown"]}
        connection.execute(sa.update(tables.studies).values(environment=environment))
    for name, role, command in (
        (f"driver:{made.id}", "driver", "hpo resume --study s"),
        (lease_of(made.id, "tensorboard:/shown"), "mirror", "hpo sync --study s"),
    ):
        lease = leases.acquire(made.ledger, name, "s", gone, SystemClock(), 1.0)
        [text] = [text for text in checked(made).differences if "lease" in text]
        assert f"{role}'s lease is held by a dead process" in text and f"`{command}` frees it" in text
        lease.release()
    # Beside a live driver it is the driver's business.
    leases.acquire(made.ledger, f"driver:{made.id}", "s", ME, SystemClock(), 1.0)
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
    study.ledger.transact(lambda c: transactions.note(c, study.id, "drift", {}, os.urandom(8).hex()))
    report = checked(study)
    assert (report.differences, report.behind) == ([], 3 + 1)
    assert taken.number == 0
    with study.ledger.write() as connection:
        connection.execute(sa.update(tables.trials).where(tables.trials.c.number == 0).values(state="pruned"))
    assert [t for t in checked(study).differences if "trial 0" in t]
    study.ledger.close()


def test_what_cannot_be_opened(made, tmp_path):
    with pytest.raises(NoLedger, match=r"the ledger .* does not exist"):
        verify(Home.at(tmp_path), f"sqlite:///{tmp_path / 'none.db'}", made.home.tracking_uri)
    with pytest.raises(StudyError, match="no study 'x'"):
        verify(made.home, made.home.storage, made.home.tracking_uri, "x")
    away = "http://127.0.0.1:9"
    report = verify(made.home, made.home.storage, away)
    assert (report.differences, report.behind) == ([], 1 + 1 + 3 * 5)  # nothing was ever sent there
    with database(made.home.root / "ledger.db", f"UPDATE mirrors SET tracker = '{away}'"):
        [text] = verify(made.home, made.home.storage, away).differences
    assert "does not answer now" in text


def test_verify_makes_nothing(made, tmp_path):
    study = Made(Home.at(tmp_path / "home"))
    study.complete(1)
    before = sorted(study.home.root.iterdir())
    assert checked(study).differences == []
    assert sorted(study.home.root.iterdir()) == before
    elsewhere = f"sqlite:///{tmp_path / 'mlflow.db'}"  # sent there once, and lost
    with database(made.home.root / "ledger.db", f"UPDATE mirrors SET tracker = '{elsewhere}'"):
        [text] = verify(made.home, made.home.storage, elsewhere).differences
    assert "is gone" in text and not (tmp_path / "mlflow.db").exists()
    study.ledger.close()


@pytest.mark.usefixtures("process")
def test_a_resume_frees_the_lease_of_a_mirror_that_died_at_the_end(tmp_path):
    """As when the driver is killed between the mirror's last transaction and its end."""
    words = ["--study", str(HARNESS / "function_study.py"), "--trials", "1", "--workers", "1"]
    home = ["--home", str(tmp_path / "home")]
    assert CliRunner().invoke(app, ["run", *words, *home]).exit_code == 0
    with contextlib.closing(Ledger(Home(tmp_path / "home").storage)) as ledger:
        leases.acquire(ledger, "mirror:1", "tiny", dead(), SystemClock(), 1.0)
    assert CliRunner().invoke(app, ["verify", *home]).exit_code == 1
    assert CliRunner().invoke(app, ["resume", "--study", "tiny", *home]).exit_code == 0
    checked_again = CliRunner().invoke(app, ["verify", *home])
    assert checked_again.exit_code == 0, checked_again.output
