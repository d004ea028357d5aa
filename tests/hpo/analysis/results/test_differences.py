"""What two studies were asked to do in different ways: what changes the measure stands first and is warned of."""

from __future__ import annotations

import shutil
import sys

import pytest
from crafted import put_trial
from made_rows import study_row
from places import HARNESS
from sqlalchemy import insert
from study_runs import begin

import hpo
from hpo import Objective
from hpo.analysis.report import data, page
from hpo.analysis.results.differences import differences, incomparable, settings
from hpo.ledger import Ledger, queries
from hpo.ledger.database import tables
from hpo.storage.home import Home

TINY = HARNESS / "tiny_study.py"
ASKED = {
    "two": {"train.folds": 2},
    "three": {"train.folds": 3, "train.num_epochs": 3},
    "fixed": {"train.folds": 2, "train.optim.lr": 0.01},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Home:
    home = Home.at(tmp_path_factory.mktemp("unlike") / "home")
    for name, overrides in ASKED.items():
        begin(home, reference="mlp", name=name, overrides={"train.num_epochs": 1} | overrides)
    ledger, worker = Ledger(home.storage), {"id": "w", "host": "box", "pid": 41, "pid_started": "x", "slots": 1}
    with ledger.write() as connection:
        connection.execute(insert(tables.workers).values(**worker, executor="local", started_at=0.0))
    put_trial(ledger, 0, "complete", (0.5,))  # of the first study
    return home


def asked(home: Home, *names: str) -> list[dict[str, str]]:
    ledger = Ledger(home.storage)
    with ledger.read() as connection:
        return [settings(queries.study_row(connection, name)) for name in names]


def test_what_changes_the_measure_stands_first(home):
    found = differences(asked(home, "two", "three"))
    assert [(one.name, one.kind, one.values) for one in found] == [
        ("train.folds", "measure", ("2", "3")),
        ("train.num_epochs", "training", ("1", "3")),
    ]
    assert incomparable(["two", "three"], found) == (
        "the values of two and three are not of one measure: train.folds: 2 in two, 3 in three."
    )


def test_a_setting_that_one_study_searches_is_shown_with_its_range(home):
    found = differences(asked(home, "two", "fixed"))
    [rate] = [one for one in found if one.name == "train.optim.lr"]
    assert rate.kind == "training" and rate.values[0].startswith("Float(") and rate.values[1] == "0.01"
    assert not incomparable(["two", "fixed"], found)


def test_the_page_and_the_frame_of_two_studies_warn_and_show_it(home, capsys):
    ledger = Ledger(home.storage)
    text = page.file_page([data.read(ledger, home, name) for name in ("two", "three")])
    warning = text.index("The values of two and three are not of one measure: train.folds: 2 in two, 3 in three.")
    row = "<code>train.folds</code></th><td>the measure</td><td><bdi>2</bdi></td><td><bdi>3</bdi></td>"
    assert warning < text.index("Studies side by side</caption>") < text.index(row)
    frame = hpo.open("two", home=home.root).compare(hpo.open("three", home=home.root))
    assert [*frame.columns][:4] == ["study", "settings.train.folds", "settings.train.num_epochs", "number"]
    assert [*frame["settings.train.folds"]] == ["2"]
    assert "are not of one measure: train.folds" in capsys.readouterr().err


def test_studies_of_one_measure_are_compared_without_a_word(home, capsys):
    hpo.open("two", home=home.root).compare(hpo.open("fixed", home=home.root))
    assert not capsys.readouterr().err
    text = page.file_page([data.read(Ledger(home.storage), home, name) for name in ("two", "fixed")])
    assert "not of one measure" not in text


def test_a_declaration_in_another_place_is_the_same_study(tmp_path):
    places = [tmp_path / name for name in ("a", "b")]
    for place in places:
        place.mkdir()
        shutil.copy(TINY, place / "tiny_study.py")
        sys.modules.pop("tiny_study", None)
        begin(home := Home.at(tmp_path / "home"), reference=str(place / "tiny_study.py"), name=place.name)
    assert differences(asked(home, "a", "b")) == []


@pytest.mark.parametrize(("metric", "kind"), [("val/loss", "measure"), ("val/accuracy", "training")])
def test_the_weights_of_a_loss_change_the_measure_of_a_loss_alone(metric, kind):
    spec = {"reference": "x", "objectives": [Objective(metric).to_json()]}
    identities = [{"config": {"loss.smoothing": value, "data.path": "x"}} for value in (0.0, 0.1)]
    rows = [study_row(spec=spec, identity=identity) for identity in identities]
    assert [(one.name, one.kind) for one in differences([settings(one) for one in rows])] == [("loss.smoothing", kind)]


def test_of_an_imported_study_only_what_it_knows_is_compared():
    known = {"reference": "mlp", "objectives": [Objective("val/loss").to_json()]}
    rows = [
        study_row(spec=known, identity={"config": {"train.folds": 2}}),
        study_row(spec=known | {"reference": "imported:csv"}),
    ]
    assert [(one.name, one.kind) for one in differences([settings(one) for one in rows])] == [("study", "measure")]
