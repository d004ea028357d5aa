"""A report is left with its study, and its MLflow run shows it."""

from __future__ import annotations

import shutil

import pytest
from crafted import open_crafted, put_trial
from study_runs import hpo

from hpo.ledger import Ledger, queries
from hpo.storage.home import Home
from hpo.tracking.mlflow.tracker import MlflowTracker
from trainer.files.durable import sha256

pytestmark = pytest.mark.whole


def test_a_report_is_left_with_the_study_and_shown_in_its_run(tmp_path, empty_mlflow):
    home = Home.at(tmp_path / "home").create()
    ledger = open_crafted(home.root / "ledger.db")
    put_trial(ledger, 0, "complete", (0.5,))
    ledger.close()
    shutil.copy(empty_mlflow, home.root / "mlflow.db")
    for _ in range(2):  # the second in place of the first
        shown = hpo("report", home=home)
        assert shown.exit_code == 0, (shown.output, shown.exception)
    assert hpo("report", "--study", "crafted", home=home).stdout == shown.stdout
    page = home.plots("crafted") / "report.html"
    assert shown.stdout == f"page: {page}\nthe study's MLflow run shows it too.\n"
    [stored] = home.files("crafted", None).rglob("report.html")
    assert page.read_bytes() == stored.read_bytes() and b"Trial 0 is the best of 1 trial:" in page.read_bytes()
    with Ledger(home.storage, create=False).read() as connection:
        uid = queries.study_row(connection, "crafted").uid
    tracker = MlflowTracker(home.tracking_uri, home.artifacts)
    [view] = tracker.find("crafted", uid)
    assert tracker.digests(view.run_id)["report.html"] == sha256(stored)
    tracker.close()
    removed = hpo("rm", "--study", "crafted", "--yes", home=home)
    assert removed.exit_code == 0, removed.output
    assert not page.exists() and not stored.exists()
