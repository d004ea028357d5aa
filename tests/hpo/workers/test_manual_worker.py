"""`hpo worker`: whom it trains for, what it says, when it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mirrored import Made
from places import HARNESS
from sqlalchemy import select, update

from hpo.clock import FakeClock
from hpo.errors import StudyError, UserError
from hpo.ledger import Ledger, leases
from hpo.ledger.database import tables
from hpo.ledger.process_id import Process
from hpo.storage.home import Home
from hpo.workers.manual_worker import LOOK, JoinableStudies

pytestmark = pytest.mark.whole

STUDY = HARNESS / "tiny_study.py"


@pytest.fixture
def two(tmp_path):
    """One ledger with a driven study in each of two homes."""
    here = Made(Home(tmp_path / "here"), "here")
    there = Made(Home(tmp_path / "there"), "there", storage=here.ledger.url)
    for made in (here, there):
        made.home.mark(made.name, made.uid)
        made.ask()
    held = [
        leases.acquire(made.ledger, f"driver:{made.id}", "s", Process("far", 1, "then"), FakeClock(), 30)
        for made in (here, there)
    ]
    yield here, there, held
    here.ledger.close()
    there.ledger.close()


def look(driven: JoinableStudies, clock: FakeClock) -> list[int] | None:
    clock.sleep(2 * LOOK)
    return driven()


def test_only_studies_of_its_home_are_joined_and_others_named_once(two, capsys):
    here, _, _ = two
    clock = FakeClock()
    driven = JoinableStudies(here.ledger, here.home, None, clock)
    assert [look(driven, clock) for _ in range(3)] == [[here.id]] * 3
    said = capsys.readouterr().out
    assert said.count("left out: home") == 1
    assert said.count("joined study here, which pid 1 on far drives") == 1


def test_a_study_of_another_home_is_refused_by_name(two):
    here, _, _ = two
    clock = FakeClock()
    with pytest.raises(UserError, match="share that directory and name it with --home"):
        look(JoinableStudies(here.ledger, here.home, "there", clock), clock)
    with pytest.raises(StudyError, match="no study 'nowhere'"):
        JoinableStudies(here.ledger, here.home, "nowhere", clock)


def test_a_study_that_ray_tune_drives_is_left_to_it(two, capsys):
    here, _, _ = two
    told = tables.studies.c.environment
    with here.ledger.write() as connection:
        [environment] = connection.execute(select(told).where(tables.studies.c.id == here.id)).scalars()
        of_tune = {**environment, "executor": "ray-tune"}
        connection.execute(update(tables.studies).where(tables.studies.c.id == here.id).values(environment=of_tune))
    clock = FakeClock()
    assert look(JoinableStudies(here.ledger, here.home, None, clock), clock) == []
    assert "left out: study here is driven by Ray Tune" in capsys.readouterr().out
    with pytest.raises(UserError, match="study here is driven by Ray Tune, which starts its trials itself"):
        look(JoinableStudies(here.ledger, here.home, "here", clock), clock)


def test_it_waits_until_a_study_is_driven_and_leaves_when_it_ends(two, capsys):
    here, _, (lease, _) = two
    clock = FakeClock()
    lease.release()
    driven = JoinableStudies(here.ledger, here.home, "here", clock)
    assert [look(driven, clock) for _ in range(2)] == [[]] * 2
    assert capsys.readouterr().out.count("study here is not driven: waiting") == 1
    lease = leases.acquire(here.ledger, f"driver:{here.id}", "s", Process("far", 2, "then"), FakeClock(), 30)
    assert look(driven, clock) == [here.id]
    lease.release()
    assert look(driven, clock) is None


def test_a_driver_that_is_silent_for_the_studys_lease_does_not_drive(two):
    here, _, (lease, _) = two
    clock = FakeClock()
    with here.ledger.write() as connection:
        connection.execute(update(tables.studies).values(lease_seconds=5.0))
    driven = JoinableStudies(here.ledger, here.home, "here", clock)
    for _ in range(6):
        lease.renew()
        assert look(driven, clock) == [here.id]
    assert [look(driven, clock) for _ in range(3)] == [[here.id], [here.id], None]


def test_a_driver_is_not_silent_while_the_worker_itself_could_not_look(two):
    here, _, (lease, _) = two
    clock = FakeClock()
    with here.ledger.write() as connection:
        connection.execute(update(tables.studies).values(lease_seconds=5.0))
    driven = JoinableStudies(here.ledger, here.home, "here", clock)
    assert look(driven, clock) == [here.id]
    clock.sleep(600.0)  # the ledger was away: neither could the driver renew
    assert look(driven, clock) == [here.id]
    lease.renew()
    assert [look(driven, clock) for _ in range(4)] == [[here.id]] * 3 + [None]


def test_a_worker_that_stays_waits_for_the_next_driver(two, capsys):
    here, _, (lease, _) = two
    clock = FakeClock()
    driven = JoinableStudies(here.ledger, here.home, "here", clock, stay=True)
    assert look(driven, clock) == [here.id]
    lease.release()
    assert [look(driven, clock) for _ in range(3)] == [[]] * 3
    leases.acquire(here.ledger, f"driver:{here.id}", "s", Process("far", 2, "then"), FakeClock(), 30)
    assert look(driven, clock) == [here.id]
    said = capsys.readouterr().out
    assert said.count("study here is not driven: waiting for `hpo run`") == 1
    assert [said.count(f"joined study here, which pid {pid} on far drives") for pid in (1, 2)] == [1, 1]


def test_a_worker_that_stays_says_which_studies_there_are(two, capsys):
    """The name may be wrong, or its study begins later."""
    here, _, _ = two
    clock = FakeClock()
    driven = JoinableStudies(here.ledger, here.home, "heer", clock, stay=True)
    assert [look(driven, clock) for _ in range(2)] == [[]] * 2
    said = capsys.readouterr().out
    assert said.count("no study 'heer' in this ledger (it holds here") == said.count("waiting for it") == 1
    assert "did you mean 'here' or 'there'?" in said


@pytest.mark.parametrize("ended", ["complete", "stopped"])
def test_a_worker_that_stays_for_one_study_leaves_when_that_has_ended(two, ended):
    here, _, (lease, _) = two
    clock = FakeClock()
    named = JoinableStudies(here.ledger, here.home, "here", clock, stay=True)
    any_study = JoinableStudies(here.ledger, here.home, None, clock, stay=True)
    early = JoinableStudies(here.ledger, here.home, "later", clock, stay=True)
    assert [look(driven, clock) for driven in (named, any_study, early)] == [[here.id], [here.id], []]
    lease.release()
    with here.ledger.write() as connection:
        connection.execute(update(tables.studies).where(tables.studies.c.id == here.id).values(state=ended))
    assert [look(driven, clock) for driven in (named, any_study, early)] == [None, [], []]


def test_a_study_that_has_ended_needs_no_worker(two, capsys):
    here, _, _ = two
    clock = FakeClock()
    with here.ledger.write() as connection:
        connection.execute(update(tables.studies).values(state="complete"))
    assert look(JoinableStudies(here.ledger, here.home, "here", clock), clock) is None
    assert "study here is complete: there is nothing to train" in capsys.readouterr().out


@pytest.fixture
def start():
    """Starts `hpo` in a home; whatever of it still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(home: Path, *arguments: str) -> subprocess.Popen[str]:
        environ = os.environ | {"HPO_HOME": str(home), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "hpo", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started.append(subprocess.Popen(command, text=True, env=environ, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], word: str) -> str:
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if word in line:
            return "".join(lines)
    raise AssertionError(f"it never said {word!r}: {''.join(lines)}")


# A step takes its time, so that nobody is done before the others have begun, until somebody lets all go.
GATED = (
    "time.sleep(self.config.pause)",
    'time.sleep(0.0 if os.path.exists(f"{os.path.dirname(__file__)}/go") else 1.0)',
)


@pytest.mark.usefixtures("process")
def test_workers_join_train_leave_and_obey_ctrl_c(tmp_path, start):
    home = Home(tmp_path / "home")
    (tmp_path / "gated.py").write_text(STUDY.read_text().replace(*GATED))
    # Without rungs, at which others make way.
    study = ("--study", str(tmp_path / "gated.py"), "--trials", "4", "--window", "4", "--strategy", "none")
    driver = start(home.root, "run", *study, "-o", "train.num_epochs=1", "--executor", "inline")
    while not (home.root / "checkpoints" / "tiny" / "study.uid").exists():
        assert driver.poll() is None
        time.sleep(0.02)
    join = ("worker", "--storage", home.storage, "--study", "tiny")
    short, long = start(home.root, *join), start(home.root, *join)
    read_until(short, "begins, attempt")
    short.send_signal(signal.SIGINT)
    said, _ = short.communicate(timeout=60)
    assert short.returncode == 130, said
    assert "trial is saved and waits" in said
    assert "left: as asked; trained 1 trial\n" in said
    begun = read_until(long, "begins, attempt")
    (tmp_path / "go").touch()
    said, _ = long.communicate(timeout=200)
    assert long.returncode == 0, said
    assert "joined study tiny, which pid" in begun
    assert "left: none of its studies is running" in said
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 0, output
    ledger = Ledger(home.storage, create=False)
    with ledger.read() as connection:
        outcomes = connection.execute(tables.attempts.select()).mappings().all()
    ledger.close()
    assert all(row["outcome"] for row in outcomes)
    assert sum(row["outcome"] == "preempted" for row in outcomes) == 1
