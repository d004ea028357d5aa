"""What a trial hands over, from the reporter to MLflow and `verify`, whoever dies in between."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_rows import study_row
from mirrored import Made
from sqlalchemy import select

from hpo.errors import UserError
from hpo.ledger import claims, transactions
from hpo.ledger.database.tables import events
from hpo.space.objective import Objective
from hpo.storage import artifacts
from hpo.tracking import mirror_process
from hpo.tracking.mlflow.tracker import MlflowTracker
from hpo.verify import verify
from hpo.workers.reporter import LedgerReporter
from hpo.workers.system_metrics import SystemMetrics
from trainer.errors import Fenced
from trainer.runtime import failpoint

pytestmark = pytest.mark.whole


@pytest.fixture
def made(home) -> Any:
    study = Made(home)
    study.ask()
    yield study
    study.ledger.close()


def reporter(made: Made, taken: claims.Claim) -> LedgerReporter:
    study = SimpleNamespace(objectives=[Objective("val/loss", "minimize")])
    opened: Any = SimpleNamespace(name=made.name, study=study, row=study_row())
    return LedgerReporter(made.ledger, made.home, opened, taken, lambda: False, SystemMetrics())


def text(tmp_path: Path, content: str) -> Path:
    source = tmp_path / "source.txt"
    source.write_text(content)
    return source


def on_disk(made: Made) -> list[str]:
    root = made.home.files(made.name, 0)
    return sorted(path.read_text() for path in root.rglob("*") if path.is_file())


def checked(made: Made, taken: claims.Claim) -> tuple[list[str], str]:
    """What `verify` says of the trial once it has ended, and what MLflow shows as a/note.txt."""
    made.report(taken, 1, {"val/loss": 0.5}, epoch=1)
    made.finish(taken, "complete", 1, [0.5])
    made.end()
    tracker = MlflowTracker(made.home.tracking_uri, made.home.artifacts)
    assert mirror_process.drain(made.ledger, tracker, made.name, made.home).behind == 0
    tracker.close()
    [seen] = made.home.artifacts.rglob("note.txt")
    assert seen.parts[-3:] == ("files", "a", "note.txt")
    return verify(made.home, made.home.storage, made.home.tracking_uri, made.name).differences, seen.read_text()


def test_the_last_one_of_a_name_is_shown_and_the_one_before_it_is_gone(made, tmp_path):
    taken = made.claim()
    reports = reporter(made, taken)
    reports.artifact(text(tmp_path, "old"), "a/note.txt")
    reports.artifact(text(tmp_path, "new"), "a/note.txt")
    assert on_disk(made) == ["new"]
    assert checked(made, taken) == ([], "new")


def test_an_attempt_that_lost_its_trial_leaves_no_trace(made, tmp_path):
    lost = made.claim()
    stopped = reporter(made, lost)
    stopped.artifact(text(tmp_path, "first"), "a/note.txt")
    made.ledger.transact(lambda c: transactions.lose(c, lost.trial_id, lost.fence, "silent"))
    taken = made.claim()
    reporter(made, taken).artifact(text(tmp_path, "second"), "a/note.txt")
    with pytest.raises(Fenced):
        stopped.artifact(text(tmp_path, "late"), "a/note.txt")
    assert on_disk(made) == ["second"]
    assert checked(made, taken) == ([], "second")


def test_what_a_killed_attempt_stored_unnamed_is_swept_by_the_next(made, tmp_path, monkeypatch):
    killed = made.claim()
    reporter(made, killed).artifact(text(tmp_path, "named"), "a/note.txt")
    monkeypatch.setattr(failpoint, "_TESTING", True)
    monkeypatch.setattr(failpoint, "_POINTS", {"artifact.after_store": ("kill", 1)})
    monkeypatch.setattr(failpoint, "_passed", {})
    child = os.fork()
    if child == 0:
        try:
            reporter(made, killed).artifact(text(tmp_path, "unnamed"), "a/note.txt")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    monkeypatch.undo()
    (made.home.files(made.name, 0) / "a.txt.0f.tmp").write_text("of a release before this one")
    assert len(on_disk(made)) == 3
    made.ledger.transact(lambda c: transactions.lose(c, killed.trial_id, killed.fence, "killed"))
    taken = made.claim()
    reporter(made, taken).sweep_files()
    assert on_disk(made) == ["named"]
    assert checked(made, taken) == ([], "named")


def attach(made: Made, taken: claims.Claim, tmp_path: Path, content: str) -> None:
    root = made.home.files(made.name, 0)
    artifacts.attach(made.ledger, root, taken.trial_id, taken.fence, {"a/note.txt": text(tmp_path, content)})


def test_outside_leftovers_outlive_the_attempt_and_are_replaced(made, tmp_path):
    taken = made.claim()
    reports = reporter(made, taken)
    reports.artifact(text(tmp_path, "its own"), "own.txt")
    attach(made, taken, tmp_path, "first")
    reports.artifact(text(tmp_path, "its last"), "own.txt")  # and sweeps
    attach(made, taken, tmp_path, "second")
    assert on_disk(made) == ["its last", "second"]
    assert checked(made, taken) == ([], "second")
    attach(made, taken, tmp_path, "after its end")
    assert on_disk(made) == ["after its end", "its last"]
    tracker = MlflowTracker(made.home.tracking_uri, made.home.artifacts)
    assert mirror_process.drain(made.ledger, tracker, made.name, made.home).behind == 0
    tracker.close()
    assert verify(made.home, made.home.storage, made.home.tracking_uri, made.name).differences == []


def test_what_is_left_from_outside_for_an_attempt_that_is_over_is_refused(made, tmp_path):
    lost = made.claim()
    made.ledger.transact(lambda c: transactions.lose(c, lost.trial_id, lost.fence, "silent"))
    made.claim()
    with pytest.raises(UserError, match="taken by another attempt"):
        attach(made, lost, tmp_path, "late")
    assert on_disk(made) == []
    assert not any(made.home.files(made.name, 0).iterdir())


def test_a_name_that_leads_out_is_refused(made, tmp_path):
    with pytest.raises(UserError, match="leads out of the trial's files"):
        reporter(made, made.claim()).artifact(text(tmp_path, ""), "../note.txt")


def test_what_a_replay_tells_again_is_recorded_once(made):
    reports = reporter(made, made.claim())
    for _ in range(2):
        reports.event("skipped_step", step=3, norm=float("inf"))
    reports.event("skipped_step", step=3, norm=2.0)  # another one at the same step
    for _ in range(2):
        reports.event("seen")
    with made.ledger.read() as connection:
        kinds = list(connection.execute(select(events.c.kind)).scalars())
    assert (kinds.count("skipped_step"), kinds.count("seen")) == (2, 2)


def test_what_of_a_gpu_is_not_measured_is_told_once(made, monkeypatch):
    told = iter(["the package is missing", "", ""])
    monkeypatch.setattr(SystemMetrics, "untold", lambda metrics: next(told))
    monkeypatch.setattr("hpo.workers.reporter.SYSTEM_PERIOD", 0.0)
    reports = reporter(made, made.claim())
    for _ in range(2):
        reports._machine()
    query = select(events.c.fields).where(events.c.kind == "gpu_not_measured")
    [fields] = made.ledger.look(lambda connection: connection.execute(query).scalars().all())
    assert fields["reason"] == "the package is missing"
