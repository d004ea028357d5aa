"""A study without a value whose declaration changes: it begins anew, as if what failed had never been."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import select, update
from study_runs import drive, hpo, query

from hpo.errors import DriftError
from hpo.ledger import Ledger
from hpo.ledger.database.tables import events, studies, trials
from hpo.storage.home import Home
from hpo.storage.metrics_json import Results
from hpo.tracking import mirror_process
from hpo.tracking.mlflow.tracker import MlflowTracker
from hpo.verify import verify

STUDY = """
from pydantic import BaseModel, ConfigDict
from hpo import Float, Objective, Study
from trainer.report import Outcome

class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    lr: float = 0.1

class Task:
    def __init__(self, config):
        self.config = config

    def fit(self, reporter, checkpoints):
        FAULT
        reporter.report(1, {"val/loss": self.config.lr}, epoch=1)
        return Outcome("complete", 1, 1)

STUDY = Study("mended", Config(), Task, {"lr": Float(0.1, 1.0)}, [Objective("val/loss")], sampler="tpe")
"""
WHOLE, BROKEN = STUDY.replace("FAULT", "pass"), STUDY.replace("FAULT", "raise ValueError('broken')")


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine" / "mended.py"
    file.write_text(BROKEN)
    return file


def mirror(home: Home) -> None:
    """What `hpo run` does beside the driver."""
    ledger, tracker = Ledger(home.storage), MlflowTracker(home.tracking_uri, home.artifacts)
    Results(ledger, "mended", home).write()
    assert mirror_process.drain(ledger, tracker, "mended", home).behind == 0
    tracker.close()
    ledger.close()


def test_what_failed_is_set_aside_once_the_declaration_is_mended(home, tmp_path, file, empty_mlflow, capsys):
    """Its digest is that of a study that never failed; ledger, files and MLflow hold the new trials alone."""
    shutil.copyfile(empty_mlflow, home.create().root / "mlflow.db")
    _, _, state, _ = drive(home, trials=9, seconds=900.0, reference=str(file), window=1)
    assert state == "stopped"
    mirror(home)
    [(uid,)] = query(home, select(studies.c.uid))
    left = home.files("mended", 0) / "f1.left" / "note.txt"
    left.parent.mkdir(parents=True)
    left.touch()
    file.write_text(WHOLE)
    digest, status, state, _ = drive(home, trials=4, reference=str(file), window=1)
    assert (state, status.trials["complete"], status.trials["failed"]) == ("complete", 4, 0)
    said = f"study 'mended' has no trial with a value, and the code of {file} changed: 3 trials set aside, and it"
    assert f"{said} begins anew with trial 0." in capsys.readouterr().err
    golden, *_ = drive(Home(tmp_path / "golden"), trials=4, reference=str(file), window=1)
    assert digest == golden
    assert not left.exists() and status.seconds_used < 900
    [(fields,)] = query(home, select(events.c.fields).where(events.c.kind == "set_aside"))
    assert [(one["number"], one["state"], one["error"]) for one in fields["trials"]] == [
        (number, "failed", "mended.py:15, in fit: ValueError: broken") for number in range(3)
    ]
    mirror(home)
    tracker = MlflowTracker(home.tracking_uri, home.artifacts)
    [(now,)] = query(home, select(studies.c.uid))
    assert [len(tracker.find("mended", one, children=True)) for one in (uid, now)] == [0, 4]
    tracker.close()
    report = verify(home, home.storage)
    assert (report.differences, report.behind) == ([], 0)


def test_a_value_or_a_trained_epoch_makes_a_change_a_drift(home, file):
    file.write_text(WHOLE)
    drive(home, trials=1, reference=str(file), window=1)
    file.write_text(BROKEN)
    again = r"or delete this one with `hpo rm --study mended`"
    with pytest.raises(DriftError, match=rf"the code of {file} changed: undo the change, .* {again}"):
        drive(home, trials=2, reference=str(file))
    with Ledger(home.storage).write() as connection:  # it waits for its second epoch
        connection.execute(update(trials).values(state="waiting", values=None, outcome=None))
    with pytest.raises(DriftError, match=f"the code of {file} changed"):
        drive(home, trials=2, reference=str(file))
    with Ledger(home.storage).write() as connection:  # its worker has left before the first
        connection.execute(update(trials).values(epoch=0))
    file.write_text(WHOLE + "MENDED = True\n")
    assert drive(home, trials=2, reference=str(file))[1].trials["complete"] == 2


def test_an_allowed_drift_keeps_the_trials(home, file):
    drive(home, trials=2, reference=str(file), window=1)
    file.write_text(WHOLE)
    _, status, _, _ = drive(home, trials=4, reference=str(file), window=1, allow_drift=True)
    assert (status.trials["failed"], status.trials["complete"]) == (2, 2)


@pytest.mark.usefixtures("process")
def test_a_driver_killed_in_the_middle_loses_nothing(home, tmp_path, file):
    drive(home, trials=2, reference=str(file), window=1)
    (left := home.files("mended", 0) / "f1.left" / "note.txt").parent.mkdir(parents=True)
    left.touch()
    file.write_text(WHOLE)
    environ = os.environ | {"HPO_TESTING": "1", "HPO_FAILPOINTS": "removal.after_set_aside=kill"}
    line = ["run", "--study", str(file), "--trials", "3", "--executor", "inline", "--home", str(home.root)]
    killed = subprocess.run([sys.executable, "-m", "hpo", *line], env=environ, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert left.exists()
    result = hpo("resume", "--trials", "3", "--executor", "inline", home=home)
    assert result.exit_code == 0, result.output
    assert not left.exists()
    digest, status, _, _ = drive(home, name="mended")
    assert status.trials["complete"] == 3
    golden, *_ = drive(Home(tmp_path / "golden"), trials=3, reference=str(file))
    assert digest == golden
    assert hpo("verify", home=home).exit_code == 0
