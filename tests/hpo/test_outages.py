"""Drivers and workers outlive the absence of PostgreSQL and of the bucket, or leave with an exit code of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from gate import Gate
from places import HARNESS

from hpo.errors import NoLedger, StorageAway
from hpo.ledger import Ledger
from hpo.ledger.database import tables
from trainer.files import outage

pytestmark = pytest.mark.whole

STUDY = str(HARNESS / "tiny_study.py")
RUN = ("run", "--study", STUDY, "--trials", "4", "--window", "4", "--sampler", "random", "--strategy", "none")
AWAY = 75


class Team:
    """Commands on one home and ledger, each a process whose output goes to a file; those left over are killed."""

    def __init__(self, home: Path, storage: str, **environ: str) -> None:
        self.storage, self._outputs = storage, home.with_suffix(".outputs")
        self._outputs.mkdir()
        self._environ = {"HPO_HOME": str(home), "HPO_STORAGE": storage, "HPO_LEASE_SECONDS": "4", **environ}
        self._begun: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[bytes]:
        command, environ = [sys.executable, "-m", "hpo", *arguments], os.environ | self._environ | environ
        with (self._outputs / str(len(self._begun))).open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environ, start_new_session=True
            )
        self._begun.append(process)
        return process

    def ended(self, process: subprocess.Popen[bytes], code: int) -> str:
        assert process.wait(240) == code, self.said(process)
        return self.said(process)

    def said(self, process: subprocess.Popen[bytes]) -> str:
        return (self._outputs / str(self._begun.index(process))).read_text()

    def heard(self, process: subprocess.Popen[bytes], words: str) -> None:
        """Waits until a running process has said the words."""
        deadline = time.monotonic() + 120
        while words not in self.said(process):
            assert process.poll() is None and time.monotonic() < deadline, self.said(process)
            time.sleep(0.05)

    def status(self) -> dict:
        return json.loads(self.ended(self.start("status", "--study", "tiny", "--json"), 0))

    def until(self, table: sa.Table, count: int, *running: subprocess.Popen[bytes]) -> None:
        """Waits until a table of the ledger has so many rows."""
        ledger, deadline = None, time.monotonic() + 120
        while ledger is None or self._rows(ledger, table) < count:
            for process in running:
                assert process.poll() is None and time.monotonic() < deadline, self.said(process)
            time.sleep(0.05)
            with contextlib.suppress(NoLedger):
                ledger = ledger or Ledger(self.storage, create=False)
        ledger.close()

    def _rows(self, ledger: Ledger, table: sa.Table) -> int:
        return ledger.look(lambda c: c.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())

    def close(self) -> None:
        for process in self._begun:
            process.kill()
            process.wait()


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    made = Team(tmp_path / "home", f"sqlite:///{tmp_path / 'ledger.db'}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(postgres_server):
    return postgres_server()


@pytest.fixture
def on_postgres(server, tmp_path: Path) -> Iterator[Team]:
    engine, name = sa.create_engine(server.url, isolation_level="AUTOCOMMIT"), f"outage_{os.urandom(4).hex()}"
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    engine.dispose()
    made = Team(tmp_path / "home", server.url.set(database=name).render_as_string(hide_password=False))
    yield made
    made.close()


def test_all_go_on_after_postgresql_was_away_for_twice_a_lease(on_postgres, server):
    team = on_postgres
    driver = team.start(*RUN, "--workers", "1", "--outage-wait", "5m", "-o", "pause=0.1")
    team.until(tables.checkpoints, 1, driver)
    joined = team.start("worker", "--study", "tiny", "--outage-wait", "5m", PYTHONUNBUFFERED="1")
    team.until(tables.workers, 2, driver, joined)
    team.heard(joined, "trial")
    server.stop()
    time.sleep(9.0)
    server.start()
    said, worker_said = team.ended(driver, 0), team.ended(joined, 0)
    for output in (said, worker_said):
        assert (
            len(re.findall(r"the ledger \S+ does not answer \(.*\); this process waits for it, up to 5 min", output))
            == 1
        )
        assert len(re.findall(r"the ledger \S+ answers again, after \d+ s\.", output)) == 1
    assert worker_said.count("joined study tiny") == 1
    status = team.status()
    assert (status["state"], status["attempts"]) == ("complete", 4), "nobody lost a trial by the outage"


def test_an_outage_that_is_too_long_ends_all_with_a_code_of_its_own(on_postgres, server):
    team = on_postgres
    driver = team.start(*RUN, "--workers", "1", "--outage-wait", "3", "-o", "pause=0.1")
    team.until(tables.checkpoints, 1, driver)
    joined = team.start("worker", "--study", "tiny", HPO_OUTAGE_WAIT="3s")
    team.until(tables.workers, 2, driver, joined)
    server.stop()
    try:
        for process in (driver, joined):
            said = team.ended(process, AWAY)
            assert re.search(r"^error: the ledger \S+ does not answer \(.*\): check that the database runs", said, re.M)
            assert "Traceback" not in said
        late = team.start("resume", "--study", "tiny", "--outage-wait", "5m")
        team.heard(late, "this process waits for it, up to 5 min more.")
        command = team.start("status", "--study", "tiny")
        assert "does not answer" in team.ended(command, AWAY), "a command that only reads does not wait"
    finally:
        server.start()
    team.ended(late, 0)
    assert team.status()["state"] == "complete"


def test_too_few_connections_are_told_by_the_run(on_postgres, server):
    team = on_postgres
    url, role = sa.make_url(team.storage), f"few_{os.urandom(4).hex()}"
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 7")
        connection.exec_driver_sql(f"ALTER DATABASE {url.database} OWNER TO {role}")
    engine.dispose()
    limited = url.set(username=role).render_as_string(hide_password=False)
    driver = team.start(*RUN, "--workers", "4", "--outage-wait", "5m", HPO_STORAGE=limited, HPO_LEASE_SECONDS="20")
    said = team.ended(driver, 0)
    told = re.findall(
        r"has no connection left for this process \(.*\): raise its max_connections, or start fewer", said
    )
    assert told and re.search(r"^(workers: )?the ledger ", said, re.M)


def test_workers_wait_for_a_bucket_and_the_run_says_so(team, bucket, monkeypatch):
    with Gate(os.environ["AWS_ENDPOINT_URL"]) as gate:
        monkeypatch.setenv("AWS_ENDPOINT_URL", gate.address)
        driver = team.start(*RUN, "--workers", "1", "--checkpoints", bucket, "--outage-wait", "5m", "-o", "pause=0.1")
        team.until(tables.checkpoints, 1, driver)
        gate.shut()
        team.heard(driver, "this process waits for it")
        gate.open()
        said = team.ended(driver, 0)
        assert (
            len(
                re.findall(r"workers: s3://\S+ cannot be reached \(the connection broke\): .*; this process wait", said)
            )
            == 1
        )
        status = team.status()
        assert (status["state"], status["attempts"]) == ("complete", 4), said


def test_a_resume_waits_for_the_bucket_and_leaves_with_one_sentence(team, bucket, monkeypatch):
    with Gate(os.environ["AWS_ENDPOINT_URL"]) as gate:
        monkeypatch.setenv("AWS_ENDPOINT_URL", gate.address)
        few = ("run", "--study", STUDY, "--trials", "1", "--workers", "1", "--sampler", "random", "-o", "pause=0.0")
        team.ended(team.start(*few, "--checkpoints", bucket), 0)
        gate.shut()
        said = team.ended(team.start("resume", "--study", "tiny", "--trials", "2"), AWAY)
        [line] = [line for line in said.splitlines() if "error" in line]
        assert re.match(
            r"error: s3://\S+ cannot be reached \(the connection broke\): check AWS_ENDPOINT_URL, the reg", line
        )
        late = team.start("resume", "--study", "tiny", "--trials", "2", "--outage-wait", "5m")
        team.heard(late, "this process waits for it, up to 5 min more.")
        gate.open()
        assert "answers again, after " in team.ended(late, 0)


def test_a_look_between_two_phases_of_a_run_waits_too(server):
    """As when PostgreSQL is away while a search has ended, and its end phase or its summary reads the ledger."""
    ledger = Ledger(server.url.render_as_string(hide_password=False))
    server.stop()
    with pytest.raises(StorageAway), ledger.read():
        pass
    starting = threading.Timer(2.0, server.start)
    starting.start()
    with outage.waiting(60.0), ledger.read() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(tables.studies)).scalar_one() >= 0
    starting.join()
    ledger.close()
