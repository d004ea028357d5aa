"""The set-up of a team: the ledger on a real PostgreSQL, tracking on a real MLflow server."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import mlflow_service
import pytest
import sqlalchemy as sa
from driven import driven
from places import HARNESS

from hpo.driver.request import request_of
from hpo.errors import NoLedger
from hpo.ledger import Ledger, queries
from hpo.ledger.database import tables
from hpo.space import trial_state
from hpo.storage.home import Home

pytestmark = pytest.mark.whole

STUDY = HARNESS / "tiny_study.py"


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory, empty_mlflow) -> Iterator[str]:
    """The URI of an MLflow server with a store and artifacts of its own."""
    with mlflow_service.serving(tmp_path_factory.mktemp("mlflow"), empty_mlflow) as uri:
        yield uri


def start(*arguments: str, home: Path, storage: str, uri: str) -> subprocess.Popen[str]:
    environ = os.environ | {"HPO_HOME": str(home), "HPO_STORAGE": storage, "HPO_TRACKING_URI": uri}
    environ["HPO_OUTAGE_WAIT"] = "2m"
    command = [sys.executable, "-m", "hpo", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


def hpo(*arguments: str, home: Path, storage: str, uri: str) -> str:
    done = start(*arguments, home=home, storage=storage, uri=uri)
    output, errors = done.communicate(timeout=240)
    assert done.returncode == 0, output + errors
    return output


def test_a_study_on_postgresql_and_a_tracking_server(tmp_path, postgres_database, mlflow_server):
    there = {"home": tmp_path / "home", "storage": postgres_database(), "uri": mlflow_server}
    hpo("run", "--study", str(STUDY), "--trials", "4", "--workers", "2", "--window", "4", **there)
    status = json.loads(hpo("status", "--study", "tiny", "--json", **there))
    assert (status["state"], sum(status["trials"].values())) == ("complete", 4)
    assert "0 differences" in hpo("verify", "--study", "tiny", **there)

    assert digest_alone(tmp_path / "alone", 4) == status["digest"]

    body = json.dumps({"experiment_ids": _experiments(mlflow_server), "max_results": 10}).encode()
    runs = _post(f"{mlflow_server}/api/2.0/mlflow/runs/search", body)["runs"]
    tags = [{tag["key"]: tag["value"] for tag in run["data"]["tags"]} for run in runs]
    states = sorted(tag["hpo.state"] for tag in tags if "hpo.trial" in tag)
    assert len(runs) == 5, "the study's run and one for each trial"
    assert states == sorted(state for state, count in status["trials"].items() for _ in range(count))
    assert not (tmp_path / "home" / "mlflow.db").exists()
    assert not (tmp_path / "home" / "ledger.db").exists()


def test_a_study_outlives_a_restart_of_postgresql(tmp_path, postgres_server):
    """The server crashes and comes back in the middle of the run: driver, workers and mirror wait for it."""
    server = postgres_server()
    there = {"home": tmp_path / "home", "storage": server.url.render_as_string(hide_password=False), "uri": ""}
    started = start("run", "--study", str(STUDY), "--trials", "6", "--workers", "2", "--window", "4", **there)
    ledger, deadline = None, time.monotonic() + 120
    while ledger is None or not count(ledger, tables.checkpoints):
        assert started.poll() is None and time.monotonic() < deadline, started.communicate()
        time.sleep(0.05)
        with contextlib.suppress(NoLedger):
            ledger = ledger or Ledger(there["storage"], create=False)
    for outage in (2.0, 0.0):
        server.stop()
        time.sleep(outage)
        server.start()
    assert not all(ended(ledger)), "the study was over before its database went"
    output, errors = started.communicate(timeout=240)
    assert started.returncode == 0, output + errors
    status = json.loads(hpo("status", "--study", "tiny", "--json", **there))
    assert (status["state"], sum(status["trials"].values())) == ("complete", 6)
    assert status["attempts"] == 6, "nobody lost a trial by the outage"
    assert "0 differences" in hpo("verify", "--study", "tiny", **there)
    ledger.close()
    assert digest_alone(tmp_path / "alone", 6) == status["digest"]


def digest_alone(root: Path, trials: int) -> str:
    """The digest of the study as one process trains it on SQLite; how long a step takes does not enter it."""
    home = Home(root).create()
    request = request_of(home, str(STUDY), window=4, overrides={"pause": 0.0})
    with closing(Ledger(home.storage)) as ledger:
        name, state = driven(ledger, request, trials=trials)
        assert state == "complete"
        return ledger.look(lambda c: queries.digest(c, queries.study_row(c, name)))


def count(ledger: Ledger, table: sa.Table) -> int:
    return ledger.look(
        lambda connection: connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
    )


def ended(ledger: Ledger) -> list[bool]:
    """Of every trial, whether it has ended."""
    states = ledger.look(lambda connection: connection.execute(sa.select(tables.trials.c.state)).scalars().all())
    return [one in trial_state.TERMINAL_STATES for one in states]


def _experiments(uri: str) -> list[str]:
    found = _post(f"{uri}/api/2.0/mlflow/experiments/search", json.dumps({"max_results": 10}).encode())
    return [experiment["experiment_id"] for experiment in found["experiments"]]


def _post(url: str, body: bytes) -> dict:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)
