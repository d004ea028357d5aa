"""Neighbouring releases work on one ledger: a kept wheel of the baseline and the code here, in both directions.

The wheel is of the first commit in which a ledger says which releases may use it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from kill import Golden, Run, check_sound, end_all, first_claim, shared_golden, wait_until
from places import ROOT
from sqlalchemy import select

from hpo.ledger.database.tables import attempts, trials, workers
from hpo.storage.home import Home

pytestmark = pytest.mark.whole

TRIALS = 8
BOTH = pytest.mark.parametrize("older_drives", [True, False], ids=["driven-by-the-older", "driven-by-the-newer"])
DRIVEN = ("--workers", "0", "--window", "4")
SELF = ("--workers", "1", "--window", "4")


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    end_all()


@pytest.fixture(scope="module")
def baseline(tmp_path_factory) -> dict[str, str]:
    """The environment in which `python -m hpo` is the kept release."""
    [wheel] = (ROOT / "tests" / "assets").glob("hpo-*.whl")
    directory = tmp_path_factory.mktemp("baseline")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    environ = {"PYTHONPATH": str(directory), "PYTHONSAFEPATH": "1"}
    where = [sys.executable, "-c", "import hpo; print(hpo.__file__)"]
    found = subprocess.run(where, env=os.environ | environ, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(directory), "another release than the kept one runs"
    return environ


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> Golden:
    return shared_golden(tmp_path_factory, "releases", *SELF, trials=TRIALS)


def of_both(home: Path, extra: tuple[str, ...], environs: tuple[dict[str, str], dict[str, str]]) -> tuple[Run, Run]:
    """The same home in the hands of one release, and of the other."""
    one, other = (
        Run(home, trials=TRIALS, extra=extra, resumed=SELF[:2], environ=dict(environ)) for environ in environs
    )
    return one, other


@BOTH
def test_a_worker_of_the_other_release_joins(tmp_path, baseline, golden, older_drives):
    """Here two workers train, one of each release. Whoever looks sees the same."""
    environs = (baseline, {}) if older_drives else ({}, baseline)
    drives, joins = of_both(tmp_path / "home", DRIVEN, environs)
    driver = drives.run()
    wait_until(lambda: drives.glance(select(trials.c.id).limit(1)), driver)
    storage = Home(drives.home).storage
    joined = [run.start("worker", "--storage", storage, "--study", "tiny", "--stay") for run in (drives, joins)]
    first_claim(drives, driver)
    looks = joins.start("status", "--study", "tiny", "--json")
    assert json.loads(joins.finished(looks))["state"] == "running"
    drives.finished(driver)
    for worker in joined:
        drives.finished(worker)
    check_sound(drives, golden.digest, lost=0)
    trained = set(drives.query(select(workers.c.pid).join(attempts, attempts.c.worker_id == workers.c.id).distinct()))
    assert len(trained) == 2, "each release has trained"


@BOTH
def test_what_one_release_began_the_other_resumes(tmp_path, baseline, golden, older_drives):
    environs = (baseline, {}) if older_drives else ({}, baseline)
    begins, goes_on = of_both(tmp_path / "home", SELF, environs)
    driver = begins.run()
    first_claim(begins, driver)
    driver.send_signal(signal.SIGINT)
    begins.finished(driver, 130)
    assert begins.status()["state"] != "complete"
    resumed = goes_on.finished(goes_on.resume())
    assert "drift" not in resumed and "changed" not in resumed, resumed
    check_sound(goes_on, golden.digest, lost=0)
