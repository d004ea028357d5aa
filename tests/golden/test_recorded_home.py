"""A home that an earlier version wrote opens, verifies and compares, and its interrupted study resumes to its end.

Numbers differ by processor and version, so these tests hold the facts that do not. home.json has the digest of the
resumed study, which was that of the uninterrupted one when it was recorded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import golden_record
import home_asset
import pytest
import torch
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.ledger import Ledger
from hpo.storage.home import Home

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


def as_then(now: Any, then: Any) -> Any:
    """Returns what is said now without the keys that were not said then, at any depth."""
    if isinstance(now, dict) and isinstance(then, dict):
        return {key: as_then(now[key], value) for key, value in then.items()}
    return now


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """The home, in a place where it was not written, with its ledger brought to this release."""
    home = home_asset.unpacked(tmp_path_factory.mktemp("asset"))
    Ledger(Home(home).storage).close()
    return home


@pytest.mark.parametrize("name", STUDIES)
def test_it_opens_with_the_status_and_digest_it_had(unpacked, name):
    """Later versions may say more. MLflow's database is known by its place, so here it lags until `hpo sync`."""
    then = {key: value for key, value in SAID[name]["status"].items() if key != "behind"}
    now = said("status", "--study", name, home=unpacked)
    assert as_then(now, then) == then


@pytest.mark.parametrize("name", STUDIES)
def test_its_trials_compare_as_they_did(unpacked, name):
    """Later versions may have more columns."""
    then = SAID[name]["compare"]
    now = said("compare", "--study", name, home=unpacked)
    assert [{key: row[key] for key in was} for row, was in zip(now, then, strict=True)] == then


def test_it_verifies(unpacked):
    hpo("verify", home=unpacked)


def test_the_interrupted_study_resumes_to_its_end(process, unpacked, tmp_path, monkeypatch):
    # MKL reads the variable at its first product. Later tests of this process are to compute as their subprocesses do.
    torch.mm(*torch.ones(2, 64, 64, dtype=torch.float64))
    monkeypatch.setenv("MKL_CBWR", golden_record.PINNED["MKL_CBWR"])  # as when it began
    home = home_asset.unpacked(tmp_path)
    resumed = CliRunner().invoke(app, ["resume", *BROKEN, "--executor", "inline", "--home", str(home)])
    assert resumed.exit_code == 0, resumed.output
    assert "began under release 0.1.0" in resumed.stderr and "sampler tpe by its earlier rule" in resumed.stderr
    again = CliRunner().invoke(app, ["resume", *BROKEN, "--executor", "inline", "--home", str(home)])
    assert "0.1.0" not in again.stderr, "it is taken over once"
    assert_resumed_from_its_checkpoint(home)
    assert_ended_as_the_uninterrupted_one(home)
    assert_every_report_kept(unpacked, home)
    hpo("sync", home=home)  # on a busy machine the mirror may have left before everything was sent
    assert "behind" not in hpo("verify", home=home)


def assert_resumed_from_its_checkpoint(home: Path) -> None:
    attempts = said("show", "1", *BROKEN, home=home)["attempts"]
    expected = [(0, "preempted"), (SAID["interrupted trial"]["step"], "complete")]
    assert [(attempt["from_step"], attempt["outcome"]) for attempt in attempts] == expected


def assert_ended_as_the_uninterrupted_one(home: Path) -> None:
    status, whole = said("status", *BROKEN, home=home), SAID["uninterrupted"]["status"]
    for key in ("state", "requested", "trials", "epochs_trained"):
        assert status[key] == whole[key], key
    assert status["attempts"] == whole["attempts"] + 1


def assert_every_report_kept(before: Path, after: Path) -> None:
    """The trials keep their parameters and what they had reported, and report the rest."""
    for number in range(SAID[home_asset.INTERRUPTED]["status"]["requested"]):
        old, new = (said("show", str(number), *BROKEN, home=home) for home in (before, after))
        assert new["params"] == old["params"] and new["config_hash"] == old["config_hash"]
        for key, curve in old["curves"].items():
            assert new["curves"][key][: len(curve)] == curve, (number, key)
        assert [epoch for _, epoch, _ in new["curves"]["val/loss"]] == [1, 2, 3, 4, 5, 6]
