"""What now: the steps of a report, by how a study stands."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from crafted import open_crafted, put_trial
from sqlalchemy import insert, update

from hpo.analysis.report import data, snapshot
from hpo.analysis.report.next_steps import next_steps
from hpo.ledger import queries, removed
from hpo.ledger.database import tables
from hpo.storage.home import Home

COMMANDS = {
    "confirm": "hpo confirm",
    "ablate": "hpo ablate",
    "anew": "hpo confirm --name",
    "seeds": "hpo confirm --seeds 9",
}
UNSURE: dict[str, Any] = {
    "confirm": [],
    "ablate": [],
    "lacking": {"confirm": "", "ablate": ""},
    "commands": COMMANDS,
    "noise": {},
    "undecided": "",
    "beaten": False,
}


@pytest.fixture
def ledger(tmp_path):
    with closing(open_crafted(tmp_path / "ledger.db")) as opened:
        yield opened


def ended(ledger, values: list[float]) -> None:
    for number, value in enumerate(values):
        put_trial(ledger, number, "complete", (value,))
    with ledger.write() as connection:
        connection.execute(update(tables.studies).values(state="complete"))


def best(number: int, **changed: Any) -> dict[str, Any]:
    one = {"number": number, "checkpoint": "c", "imported": False, "train": "hpo run"}
    return {"best": [one | changed], "promoted": []}


def steps(ledger, answer: dict[str, Any], sure: dict[str, Any] = UNSURE) -> list[str]:
    """The words by which each step is told from the others."""
    with ledger.read() as connection:
        found = next_steps(snapshot.read(connection, "crafted"), answer, sure, [])
    return [f"{one['why'].split(':')[0]}: {one['command']}" for one in found]


@pytest.mark.parametrize(
    ("state", "word", "command"),
    [
        ("running", "Wait for its end", "hpo watch --study crafted"),
        ("open", "Go on with it", "hpo resume --study crafted"),
    ],
)
def test_a_study_that_has_not_ended(ledger, state, word, command):
    if state == "running":
        with ledger.write() as connection:
            row = {"name": "driver:1", "owner": "x", "fence": 1, "host": "elsewhere", "pid": 1, "pid_started": "y"}
            connection.execute(insert(tables.leases).values(row))
    assert steps(ledger, {"best": [], "promoted": []}) == [f"{word}: {command}"]


def test_a_study_without_an_answer(ledger):
    put_trial(ledger, 0, "pruned", (0.5,))
    with ledger.write() as connection:
        connection.execute(update(tables.studies).values(state="complete"))
    none = {"best": [], "promoted": []}
    assert steps(ledger, none) == ["Ask for more trials: hpo resume --study crafted --trials 2"]
    put_trial(ledger, 1, "failed", (0.5,))
    assert steps(ledger, none) == ["See why the first trial came to nothing: hpo show 1 --study crafted"]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (5, "Ask for no more trials of this space: "),  # two of eight came after it
        (6, "Search on with 8 more, 16 in all: hpo resume --study crafted --trials 16"),
    ],
)
def test_more_trials_are_worth_it_where_the_best_came_late(ledger, place, said):
    ended(ledger, [0.9 if number == place else 0.5 for number in range(8)])
    assert said in steps(ledger, best(place))


def test_removed_trials_count_in_what_is_asked_for(ledger):
    """As they do in the study's budget, which could otherwise be asked for what it has already."""
    ended(ledger, [0.9 if number == 7 else 0.5 for number in range(8)])
    with ledger.write() as connection:
        for number in range(2):
            removed.mark(connection, queries.study_row(connection, "crafted"), number)
    assert "Search on with 8 more, 16 in all: hpo resume --study crafted --trials 16" in steps(ledger, best(7))


@pytest.mark.parametrize(("deviation", "on"), [(0.39, True), (0.41, False)])
def test_a_late_gain_below_the_noise_promises_no_more(ledger, deviation, on):
    """Trial 7 is better by 0.4 than the best before it."""
    ended(ledger, [0.4, 0.5, *[0.3] * 5, 0.9])
    said = steps(ledger, best(7), UNSURE | {"noise": {"val/accuracy": {"deviation": deviation, "runs": 9}}})
    assert ("Search on with 8 more, 16 in all: hpo resume --study crafted --trials 16" in said) is on
    assert ("Ask for no more trials of this space: " in said) is not on


def test_what_seeds_cannot_tell_apart_is_trained_under_more(ledger):
    ended(ledger, [0.5, 0.9])
    sure = UNSURE | {"confirm": [{"rows": [{"trial": 1, "again": {"mean": 0.6}, "left": False}]}], "ablate": [{}]}
    said = "Train the confirmed trials under more seeds: hpo confirm --seeds 9"
    assert said not in steps(ledger, best(1), sure)
    assert said in steps(ledger, best(1), sure | {"undecided": "2 seeds cannot tell"})


def test_of_few_complete_trials_nothing_is_said_of_more(ledger):
    ended(ledger, [0.1, 0.2, 0.3, 0.9])
    assert not [one for one in steps(ledger, best(3)) if "earch on" in one or "no more trials" in one]


def test_seeds_come_before_parameters_and_the_best_of_them_is_registered(ledger):
    ended(ledger, [0.5, 0.9])
    assert steps(ledger, best(1)) == [
        "Train the best trials under other seeds, which tells gain from luck: hpo confirm",
    ]
    rows = [
        {"trial": 1, "again": {"mean": 0.4}, "left": False},
        {"trial": 0, "again": {"mean": 0.6}, "left": False},
        {"trial": 2, "again": None, "left": False},
    ]
    confirmed = UNSURE | {"confirm": [{"rows": rows}]}
    assert steps(ledger, best(1), confirmed) == [
        "Train trial 0 without each parameter, which tells what to keep: hpo ablate",
        "Register trial 0, the best under other seeds, in MLflow, for others to load: hpo promote 0 --study crafted",
    ]
    whole = confirmed | {"ablate": [{}]}
    assert steps(ledger, best(1) | {"promoted": [{"trial": 0, "label": "m"}]}, whole) == []
    assert steps(ledger, best(1, checkpoint=None) | {"promoted": [{"trial": 0, "label": "m"}]}, whole) == []


def test_a_trial_that_the_default_beats_is_not_registered(ledger):
    ended(ledger, [0.5, 0.9])
    rows = [{"trial": 1, "again": {"mean": 0.4}, "left": False}]
    confirmed = UNSURE | {"confirm": [{"rows": rows}], "ablate": [{}]}
    [said] = steps(ledger, best(1), confirmed)
    assert "promote 1" in said
    assert steps(ledger, best(1), confirmed | {"beaten": True}) == []


def test_a_best_that_came_after_the_others_is_confirmed_next(ledger):
    ended(ledger, [0.5, 0.9])
    sure = UNSURE | {"confirm": [{"rows": [{"trial": 0, "again": {"mean": 0.6}, "left": False}]}], "ablate": [{}]}
    assert steps(ledger, best(1), sure) == [
        "Train the best trials under other seeds again: hpo confirm --name",
    ]


def test_an_imported_study_is_searched_on_from(ledger):
    ended(ledger, [0.5])
    of = best(0, imported=True, train="hpo run --study STUDY --warm-start crafted")
    [said] = steps(ledger, of)
    assert said.endswith(": hpo run --study STUDY --warm-start crafted")


def test_the_report_has_them_with_its_cautions_first(ledger, tmp_path):
    ended(ledger, [0.5, 0.6, 0.7, 1.0])
    report = data.read(ledger, Home.at(tmp_path), "crafted")
    assert report.next_steps[0] == {
        "why": "Read the cautions, each of which names a remedy",
        "command": "",
    }
    assert report.next_steps[1]["command"] == f"hpo confirm --study crafted --home {tmp_path}"
