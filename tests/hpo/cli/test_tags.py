"""Tags by command, by function and by program, and everywhere that they are shown."""

from __future__ import annotations

import json
import shutil
from contextlib import closing

import pandas as pd
import pytest
import yaml
from crafted import open_crafted, put_trial
from study_runs import hpo, refused

import hpo as library
from hpo.analysis.report import data
from hpo.interchange.export import document
from hpo.ledger import Ledger
from hpo.storage.home import Home


@pytest.fixture
def crafted(home: Home, empty_mlflow) -> Home:
    """A study of three complete trials."""
    home.create()
    shutil.copyfile(empty_mlflow, home.root / "mlflow.db")
    with closing(open_crafted(home.root / "ledger.db")) as ledger:
        for number in range(3):
            put_trial(ledger, number, "complete", (0.5 + number / 10,), revision=1, fence=1)
    return home


def test_a_trial_is_tagged_and_shown_with_its_tags_everywhere(crafted, tmp_path):
    before = library.open(home=crafted.root).digest
    said = hpo("tag", "1", "team=vision", "note=first try", home=crafted)
    assert said.exit_code == 0, said.output
    assert said.stdout.splitlines()[-1] == "crafted, trial 1: note=first try, team=vision"
    assert hpo("tag", "1", "team=speech", "--remove", "note", home=crafted).stdout == "crafted, trial 1: team=speech\n"
    hpo("tag", "2", "team=vision", home=crafted)
    facts = json.loads(hpo("tag", "study", "owner=ann", "--json", home=crafted).stdout)
    assert facts == {"study": "crafted", "number": None, "tags": {"owner": "ann"}}
    assert json.loads(hpo("show", "1", "--json", home=crafted).stdout)["tags"] == {"team": "speech"}
    assert "tags\n  team  speech\n" in hpo("show", "1", home=crafted).stdout
    assert json.loads(hpo("status", "--json", home=crafted).stdout)["tags"] == {"owner": "ann"}
    rows = json.loads(hpo("compare", "--json", home=crafted).stdout)
    assert {row["number"]: row["tags.team"] for row in rows} == {0: None, 1: "speech", 2: "vision"}
    handle = library.open(home=crafted.root)
    frame = handle.trials()
    assert frame["tags.team"].where(frame["tags.team"].notna(), "").tolist() == ["", "speech", "vision"]
    assert handle.digest == before, "tags say nothing of what was found"
    hpo("export", "--to", str(tmp_path / "all.csv"), home=crafted)
    assert "tags.team" in pd.read_csv(tmp_path / "all.csv").columns
    trials = handle.to_optuna().trials
    assert [one.user_attrs.get("tags.team") for one in trials] == [None, "speech", "vision"]
    with closing(Ledger(crafted.storage, create=False)) as ledger:
        report = data.read(ledger, crafted, "crafted")
    assert report.trials["tags"] == {"team": [None, "speech", "vision"]}


def test_an_exported_study_has_its_tags(crafted, monkeypatch):
    hpo("tag", "0", "team=vision", home=crafted)
    hpo("tag", "study", "owner=ann", home=crafted)
    from hpo.interchange import export

    class Nothing:
        space = type("", (), {"dimensions": {}})

    monkeypatch.setattr(export, "searched", lambda *_: Nothing)
    with closing(Ledger(crafted.storage, create=False)) as ledger:
        found = document(ledger, "crafted")
    assert (found["tags"], found["trials"][0]["tags"]) == ({"owner": "ann"}, {"team": "vision"})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["9", "a=b"], "study 'crafted' has no trial 9: it has trials 0 to 2."),
        (["0", "a"], "tag 'a' has no value: write KEY=VALUE"),
        (["0", "hpo.state=x"], "the tag 'hpo.state' is the platform's own"),
        (["0", "mlflow.note.content=x"], "is the platform's own"),
        (["0", "--remove", "team"], "trial 0 of study 'crafted' has no tag 'team': it has none."),
        (["0", "a=b", "--remove", "a"], "tag 'a' is set and removed at once"),
        (["team=vision"], "'team=vision' is not a trial: give its number, or `study`"),
        (["9" * 20, "a=b"], "'99999999999999999999' is not a trial: give its number, or `study`"),
        (["-1", "a=b"], "No such option"),
    ],
)
def test_what_cannot_be_tagged_is_refused_in_a_sentence(crafted, arguments, said):
    assert said in refused(hpo("tag", *arguments, home=crafted), 2)


def test_without_a_tag_those_there_are_are_shown(crafted):
    assert hpo("tag", "0", home=crafted).stdout == "crafted, trial 0: no tags\n"


FUNCTION = """
import hpo

@hpo.study(space={"lr": hpo.Float(0.1, 0.9)}, minimize="loss", name="tagged")
def train(trial):
    trial.tag("half", "low" if trial.params.lr < 0.5 else "high")
    trial.report(1, {"loss": trial.params.lr})
    trial.tag("seen", trial.number)
"""
PROGRAM = """
from hpo.client import trial
trial.tag("half", "low" if trial.params.lr < 0.5 else "high")
trial.report(1, {"loss": trial.params.lr})
trial.tag("seen", trial.number)
"""
COMMAND = {
    "command": "{python} program.py",
    "space": {"lr": {"type": "float", "low": 0.1, "high": 0.9}},
    "minimize": "loss",
    "name": "tagged",
}


@pytest.mark.whole
@pytest.mark.parametrize("door", ["function.py", "command.yaml"])
def test_functions_and_programs_tag_their_trials(process, tmp_path, door):
    (tmp_path / "function.py").write_text(FUNCTION)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "command.yaml").write_text(yaml.safe_dump(COMMAND))
    home = Home.at(tmp_path / "home")
    run = ("run", "--study", str(tmp_path / door), "--trials", "2", "--executor", "inline", "--tag", "team=vision")
    ran = hpo(*run, home=home)
    assert ran.exit_code == 0, ran.output
    study = library.open(home=home.root)
    for _, row in study.trials().iterrows():
        assert row["tags.half"] == ("low" if row["params.lr"] < 0.5 else "high")
        assert row["tags.seen"] == str(row["number"])
    assert study.status().tags == {"team": "vision"}
    checked = hpo("verify", home=home)
    assert checked.exit_code == 0, checked.output


def test_a_functions_tag_that_cannot_be_is_its_error(tmp_path):
    from told import Told, fit

    from trainer.errors import TrainerError

    def train(trial):
        trial.tag("hpo.state", "x")

    with pytest.raises(TrainerError, match=r"trial\.tag\(\): the tag 'hpo\.state' is the platform's own"):
        fit(train, tmp_path, Told())
