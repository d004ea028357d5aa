"""A ledger that comes back from an older backup: files and MLflow follow it, and the study ends as ever."""

from __future__ import annotations

import random
import shutil
import signal
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from kill import Golden, Run, end_all, first_claim, shared_golden, wait_for_progress
from processes import processes_of
from sqlalchemy import update

from hpo.ledger import Ledger, queries
from hpo.ledger.database.tables import trials
from hpo.storage.home import Home
from hpo.storage.reconcile import reconcile
from trainer.checkpoint.location import Disk

pytestmark = pytest.mark.usefixtures("process")


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    end_all()


@pytest.fixture(scope="session")
def golden(tmp_path_factory, process) -> Golden:
    return shared_golden(tmp_path_factory, "plain")


def restore(run: Run, backup: Path) -> None:
    for name in ("ledger.db-wal", "ledger.db-shm"):
        (run.home / name).unlink(missing_ok=True)
    shutil.copy(backup / "ledger.db", run.home / "ledger.db")


@pytest.fixture
def restored(tmp_path, golden) -> Run:
    """A study that has ended, and has the ledger of its first third: retention has dropped checkpoints since."""
    run, backup = Run(tmp_path / "home"), tmp_path / "backup"
    driver = run.run()
    first_claim(run, driver)
    wait_for_progress(run, driver, "driver", golden.values // 3, random.Random(0))
    assert driver.poll() is None, "the backup is made while workers write"
    run.says("backup", "--to", str(backup))
    processes = processes_of(driver.pid)
    run.finished(driver)
    psutil.wait_procs(processes, timeout=60)  # a repair leaves the trials of a living worker alone
    restore(run, backup)
    return run


def digest(run: Run) -> str:
    with closing(Ledger(Home(run.home).storage)) as ledger, ledger.read() as connection:
        return queries.digest(connection, queries.study_row(connection, "tiny"))


def test_a_resume_after_a_restore_ends_as_the_uninterrupted_study(restored, golden):
    assert "differs" in restored.finished(restored.start("verify"), 1)
    killed = {"HPO_TESTING": "1", "HPO_FAILPOINTS": "reconcile.after_rows=kill"}
    restored.environ |= killed
    restored.finished(restored.resume(), -signal.SIGKILL)
    for name in killed:
        del restored.environ[name]
    said = restored.finished(restored.resume())
    assert "is gone, so its row is dropped" in said or "is known to no row, so it is removed" in said
    assert digest(restored) == golden.digest
    assert restored.says("verify").startswith("0 differences")


def test_repair_makes_all_agree_without_a_run(restored, golden):
    notes = restored.home / "checkpoints" / "tiny" / "00000" / "notes.txt"
    notes.write_text("mine")
    planned = restored.says("repair", "--dry-run")
    assert "would repair" in planned and "known to no row" in planned
    before = restored.finished(restored.start("verify"), 1)
    repaired = restored.says("repair")
    assert "repaired" in repaired
    after = restored.finished(restored.start("verify"), 1)
    assert before != after and notes.read_text() == "mine"
    notes.unlink()
    after = "".join(line for line in after.splitlines(keepends=True) if "notes.txt" not in line)
    # The trials that ran at the time of the backup still wait for a resume, and nothing else differs.
    left = [line for line in after.splitlines() if line.startswith("  differs:")]
    assert left == [] or all("its worker is dead" in line or "held by a dead process" in line for line in left), after
    restored.finished(restored.resume())
    assert digest(restored) == golden.digest
    assert restored.says("verify").startswith("0 differences")


def test_a_lost_checkpoint_of_an_ended_trial_is_forgotten(tmp_path, golden):
    run = Run(tmp_path / "home")
    run.finished(run.run())
    lost = next((run.home / "checkpoints" / "tiny" / "00000").glob("step-*"))
    shutil.rmtree(lost)
    assert f"checkpoint {lost.name} is damaged" in run.finished(run.start("verify"), 1)
    assert f"trial 0: checkpoint {lost.name} is gone, so its row is dropped" in run.says("repair")
    assert digest(run) == golden.digest
    assert run.says("verify").startswith("0 differences")


def test_a_study_that_is_driven_is_not_repaired(tmp_path, golden):
    run = Run(tmp_path / "home")
    driver = run.run()
    first_claim(run, driver)
    assert "study 'tiny' already has a driver" in run.finished(run.start("repair"), 3)
    run.finished(driver)
    assert digest(run) == golden.digest


def test_a_home_without_the_studys_checkpoints_is_refused(tmp_path, golden):
    """From there all of them would look lost."""
    run = Run(tmp_path / "home")
    run.finished(run.run())
    away = run.home.with_name("away")
    (run.home / "checkpoints").rename(away)
    assert "is not the one study 'tiny' is driven from" in run.finished(run.start("repair"), 2)
    away.rename(run.home / "checkpoints")
    assert run.says("verify").startswith("0 differences")


def test_a_trial_that_a_worker_claims_meanwhile_is_left_alone(tmp_path, golden, monkeypatch):
    run = Run(tmp_path / "home")
    run.finished(run.run())
    shutil.rmtree(next((run.home / "checkpoints" / "tiny" / "00000").glob("step-*")))
    home = Home(run.home)
    with closing(Ledger(home.storage)) as ledger:
        study = ledger.look(lambda connection: queries.study_row(connection, "tiny"))
        [lost] = reconcile(ledger, home, study, None)
        assert lost.startswith("trial 0: checkpoint ")
        listed = Disk.files

        def claimed(self: Disk, directory: Path) -> set[str]:
            with ledger.write() as connection:
                connection.execute(update(trials).where(trials.c.number == 0).values(fence=trials.c.fence + 1))
            return listed(self, directory)

        monkeypatch.setattr(Disk, "files", claimed)
        assert reconcile(ledger, home, study, None) == []
