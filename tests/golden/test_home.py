"""A home that an earlier version wrote opens, verifies and compares, and its interrupted study resumes to its end.

Numbers differ by processor and version, so what is held here are the facts that do not. test_golden.py compares the
digest of the resumed study where the platform is the recorded one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import home_asset
import pytest
from typer.testing import CliRunner

from hpo.cli import app

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # MLflow raises it

SAID = home_asset.recorded()
STUDIES = (home_asset.COMPLETE, home_asset.INTERRUPTED)
BROKEN = ("--study", home_asset.INTERRUPTED)


def hpo(*arguments: str, home: Path) -> str:
    """The output of a command that succeeds."""
    result = CliRunner().invoke(app, [*arguments, "--home", str(home)])
    assert result.exit_code == 0, result.output
    return result.stdout


def said(*arguments: str, home: Path) -> Any:
    """What a command prints as JSON."""
    return json.loads(hpo(*arguments, "--json", home=home))


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """The home, in a place where it was not written."""
    return home_asset.unpacked(tmp_path_factory.mktemp("asset"))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    """The same, once the interrupted study is resumed to its end."""
    home = home_asset.unpacked(tmp_path_factory.mktemp("resumed"))
    hpo("resume", *BROKEN, "--executor", "inline", "--allow-drift", home=home)
    return home


@pytest.mark.parametrize("name", STUDIES)
def test_it_opens_with_the_status_and_digest_it_had(unpacked, name):
    assert said("status", "--study", name, home=unpacked) == SAID[name]["status"]


@pytest.mark.parametrize("name", STUDIES)
def test_its_trials_compare_as_they_did(unpacked, name):
    assert said("compare", "--study", name, home=unpacked) == SAID[name]["compare"]


def test_it_verifies(unpacked):
    hpo("verify", home=unpacked)


def test_the_interrupted_study_resumes_from_its_checkpoint(resumed):
    trial, stopped = said("show", "1", *BROKEN, home=resumed), SAID["interrupted trial"]
    assert [(one["from_step"], one["outcome"]) for one in trial["attempts"]] == [
        (0, "preempted"),
        (stopped["step"], "complete"),
    ]


def test_it_ends_with_the_trials_and_epochs_of_the_uninterrupted_one(resumed):
    status, whole = said("status", *BROKEN, home=resumed), SAID["uninterrupted"]["status"]
    for key in ("state", "requested", "trials", "epochs_trained"):
        assert status[key] == whole[key], key
    assert status["attempts"] == whole["attempts"] + 1


def test_a_resume_keeps_parameters_and_every_report(unpacked, resumed):
    for number in range(SAID[home_asset.INTERRUPTED]["status"]["requested"]):
        before, after = (said("show", str(number), *BROKEN, home=home) for home in (unpacked, resumed))
        assert after["params"] == before["params"] and after["config_hash"] == before["config_hash"]
        for key, curve in before["curves"].items():
            assert after["curves"][key][: len(curve)] == curve, (number, key)
        assert [epoch for _, epoch, _ in after["curves"]["val/loss"]] == [1, 2, 3, 4, 5, 6]


def test_the_resumed_home_verifies_and_mlflow_has_everything(resumed):
    assert "behind" not in hpo("verify", home=resumed)
