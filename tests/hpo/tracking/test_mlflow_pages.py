"""MLflow's pages in a real browser: what a person looks for after a study stands where they click."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path

import pytest

import hpo
from docs import mlflow_tour

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.whole,
    pytest.mark.usefixtures("process"),
    pytest.mark.skipif(CHROMIUM is None, reason="runs after `apt-get install chromium`"),
    pytest.mark.slow,
]


@pytest.mark.timeout(900)
def test_the_best_why_another_stopped_two_compared_and_a_model(tmp_path):
    """Its pictures are those of docs/guide/mlflow.md, which docs/make_pictures.py takes in the same way."""
    home = tmp_path / "home"
    mlflow_tour.prepared(home)
    study = hpo.open(home=home)
    stopped = study.trials().query("state == 'pruned'").iloc[-1]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pictures = Path(os.environ.get("PICTURES", tmp_path))
    seen = mlflow_tour.walk(home, port, study.name, f"{study.name}-{stopped['number']:04d}", pictures)
    assert seen["trials"].index(f"mlp-{study.best['number']:04d}") == 0
    assert f"Complete: val/accuracy {study.best['values']['val/accuracy']:.6g}" in seen["best"]
    assert stopped["reason"].partition(";")[0] in seen["stopped"]
    assert {"trials/complete", "trials/pruned"} <= {*re.findall(r"trials/\w+", seen["study"])}
    assert all(name in seen["compare"] for name in seen["trials"][:2])
    assert f"Trial {study.best['number']} of study mlp" in seen["model"]
    assert {path.name for path in pictures.glob("mlflow-*.png")} == {f"mlflow-{one}.png" for one in mlflow_tour.TAKEN}
