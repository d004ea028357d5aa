"""Messages say what a command does: what was set is shown, and how a study goes on is true."""

from __future__ import annotations

import json

import pytest
from crafted import open_crafted, put_trial
from sqlalchemy import insert
from study_runs import hpo as command
from study_runs import refused

from hpo.declaration.budget import Budget
from hpo.driver.end_reason import mend
from hpo.ledger.database import tables
from hpo.storage.home import Home

FUNCTION = """
import hpo

@hpo.study(space={"lr": hpo.Float(0.1, 1.0), "size": hpo.Int(1, 9)}, minimize="loss")
def train(trial):
    trial.report(1, {"loss": trial.params.lr})
"""
RUN = ("--executor", "inline", "--sampler", "random")


@pytest.fixture
def home(tmp_path, monkeypatch) -> Home:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(FUNCTION)
    return Home.at(tmp_path / "home")


def test_what_is_pinned_is_shown_beside_what_is_searched(process, home):
    command("run", "train.py", "--trials", "1", "-o", "size=3", *RUN, home=home)
    assert "  size = 3 (set, not searched)" in command("best", home=home).stdout.splitlines()
    [line] = [line for line in command("show", "0", home=home).stdout.splitlines() if line.strip().startswith("size")]
    assert line.split() == ["size", "3", "set", "for", "the", "study,", "not", "searched"]
    assert json.loads(command("show", "0", "--json", home=home).stdout)["overrides"] == {"size": 3}


def test_a_study_whose_file_was_moved_says_how_it_goes_on_and_does(process, home, tmp_path):
    command("run", "train.py", "--trials", "1", *RUN, home=home)
    (tmp_path / "moved").mkdir()
    (tmp_path / "train.py").rename(tmp_path / "moved" / "train.py")
    said = refused(command("resume", "--trials", "2", home=home), 2)
    assert "train.py, the file of study 'train', is not there any more: put it back, or `hpo run --study" in said
    again = said.split("`hpo ")[1].split("`")[0].replace("NEW_PLACE", str(tmp_path / "moved")).split()
    ran = command(*[word for word in again if word != "--home" and word != str(home.root)], "--trials", "2", home=home)
    assert ran.exit_code == 0 and "train: complete, 2 of 2 trials ended" in ran.output


@pytest.mark.parametrize(("saved", "goes_on"), [(True, "from the last checkpoints"), (False, "start again")])
def test_a_study_that_saves_nothing_does_not_go_on_from_checkpoints(tmp_path, saved, goes_on):
    home = Home.at(tmp_path / "home").create()
    ledger = open_crafted(home.root / "ledger.db")
    put_trial(ledger, 0, "complete", (0.5,))
    put_trial(ledger, 1, "waiting")
    if saved:
        row = {"trial_id": 1, "step": 1, "epoch": 1, "fence": 1, "path": "c", "sha256": "0", "size": 1, "at": 0.0}
        row |= {"revision": 1}
        with ledger.write() as connection:
            connection.execute(insert(tables.checkpoints).values(row | {"state": "kept", "best": False, "metrics": {}}))
    ledger.close()
    [line] = [line for line in command("status", home=home).stdout.splitlines() if line.startswith("hpo resume")]
    assert goes_on in line and ("checkpoints" in line) is saved


def test_one_command_is_not_said_to_do_two_things():
    without = mend("f", Budget(5, None), 1, [1.0], scored=False)
    assert without.count("`hpo resume --study f`") == 1 and "starts it over" not in without
    used_up = mend("f", Budget(1, None), 1, [1.0], scored=False)
    assert "`hpo resume --study f` starts it over" in used_up and "`hpo resume --study f --trials 2` goes on" in used_up
