"""Trackers besides MLflow, and alerts, beside a study that is killed and goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import shown
from mirrored import Made
from receivers import receiver
from sqlalchemy import select, update

from hpo.ledger import Ledger, leases, queries
from hpo.ledger.database import tables
from hpo.tracking import mirror_process, trackers

pytestmark = pytest.mark.whole


@pytest.fixture
def made(home):
    study = Made(home)
    yield study
    study.ledger.close()


def mirror(made: Made, uri: str, **environ: str) -> int:
    words = ["-m", "hpo.tracking.mirror_process", "--study", "s", "--home", str(made.home.root), "--once"]
    environment = os.environ | {"HPO_TRACKING_URI": uri} | environ
    return subprocess.run([sys.executable, *words], env=environment, timeout=120, capture_output=True).returncode


def reported(ledger: Ledger, number: int) -> dict[tuple[str, int], float]:
    """(key, step) -> value of all that a trial has reported."""
    joined = select(tables.reports).join(tables.trials).where(tables.trials.c.number == number)
    rows = ledger.look(lambda connection: connection.execute(joined).mappings().all())
    return {(row["key"], row["step"]): row["value"] for row in rows}


POINTS = ["mirror.after_append=kill@2", "mirror.after_send=kill@1", "mirror.after_cursor=kill@1"]


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_mirror_to_tensorboard_leaves_every_point_once(made, tmp_path, point):
    for _ in range(3):
        made.complete(6)
    uri = f"tensorboard:{tmp_path / 'board'}"
    killed = mirror(made, uri, HPO_TESTING="1", HPO_FAILPOINTS=point)
    assert killed == -signal.SIGKILL
    made.complete(4)
    assert mirror(made, uri) == 0
    assert mirror_process.behind(made.ledger, uri, "s") == 0
    for number in range(4):
        found = shown.tensorboard(tmp_path / "board" / "s" / f"s-{number:04d}")
        here = reported(made.ledger, number)
        assert here and {key: found[key][1] for key in here} == pytest.approx(here, rel=1e-6)
    assert made.ledger.look(lambda c: leases.holder(c, trackers.lease_of(made.id, uri))) is None


def test_several_trackers_have_cursors_and_leases_of_their_own(made, tmp_path):
    uris = [f"tensorboard:{tmp_path / name}" for name in ("a", "b")]
    names = {trackers.lease_of(made.id, uri) for uri in (*uris, made.home.tracking_uri)}
    assert len(names) == 3 and all(len(name) <= 80 for name in names)
    made.complete(2)
    for uri, behind in zip(uris, (0, 0), strict=True):
        assert mirror_process.behind(made.ledger, uri, "s") > 0
        tracker = trackers.open_tracker(uri, made.home.artifacts)
        assert mirror_process.drain(made.ledger, tracker, "s", made.home).behind == behind
    with made.ledger.write() as connection:
        row = connection.execute(tables.studies.select()).mappings().one()
        values = {"environment": row["environment"] | {"trackers": uris}}
        connection.execute(update(tables.studies).values(**values))
        assert trackers.leases_of(queries.study_row(connection, "s"))[1:] == [
            trackers.lease_of(made.id, uri) for uri in uris
        ]


def hpo(directory: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpo", *words]
    environment = os.environ | environ
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.usefixtures("process")
def test_a_study_that_is_killed_and_resumed_tells_and_shows_all_once(tmp_path):
    """The driver is killed with all that is beside it; a resume asks for neither alerts nor trackers again."""
    with receiver() as server:
        (tmp_path / "url").write_text(server.url)
        run = ["run", "--study", "mlp", "--executor", "inline", "-o", "train.num_epochs=2", "--trials", "3"]
        run += ["--tracker", "tensorboard:board", "--alert", f"webhook:@{tmp_path / 'url'} on end,best,failure,lost"]
        run += ["--alert", f"slack:@{tmp_path / 'not-there'} on end,best"]
        killed = hpo(tmp_path, *run, HPO_TESTING="1", HPO_FAILPOINTS="worker.before_finish=kill@2")
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        resumed = hpo(tmp_path, "resume")
        assert resumed.returncode == 0, resumed.stderr
        status = hpo(tmp_path, "status")
    untaken = rf"\d alerts? to slack:@{tmp_path}/not-there (?:was|were) not taken yet: its file .* cannot be read"
    assert len(re.findall(untaken, resumed.stderr)) == 1 and re.search(untaken, status.stdout)
    ids = [got.id.partition("/")[2] for got in server.got]
    assert "end/complete/3" in ids and "best/0" in ids and len(ids) >= 3
    assert len(set(ids)) == len(ids), "nothing was killed between an answer and its mark"
    ledger = Ledger(f"sqlite:///{tmp_path / '.hpo' / 'ledger.db'}", create=False)
    for number in range(3):
        found = shown.tensorboard(tmp_path / "board" / "mlp" / f"mlp-{number:04d}")
        here = reported(ledger, number)
        assert {key: found[key][1] for key in here} == pytest.approx(here, rel=1e-6)
    for name in ("alerts:1", trackers.lease_of(1, f"tensorboard:{tmp_path / 'board'}")):
        deadline = time.monotonic() + 30
        while ledger.look(lambda connection, name=name: leases.holder(connection, name)) is not None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    with ledger.read() as connection:
        stored = repr(connection.execute(tables.alerts.select()).all())
        assert server.url not in stored and server.url not in repr(queries.study_row(connection, "mlp"))
    ledger.close()
    removed = hpo(tmp_path, "rm", "--study", "mlp", "--yes")
    assert removed.returncode == 0, removed.stderr
    assert not list((tmp_path / "board").rglob("*tfevents*"))
