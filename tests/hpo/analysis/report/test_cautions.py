"""Each caution of a report: beyond its threshold it is there, and short of it it is not."""

from __future__ import annotations

from typing import Any

import pytest
from crafted import open_crafted, put_trial
from sqlalchemy import insert, update

from hpo.analysis.report import snapshot
from hpo.analysis.report.cautions import cautions
from hpo.analysis.report.cost import cost
from hpo.ledger.database import tables

LR = {"type": "Float", "low": 1e-4, "high": 1e-1, "log": True}
WIDTH = {"type": "Int", "low": 16, "high": 256, "log": False, "step": 1, "powers_of_two": True}
DEPTH = {"type": "Int", "low": 1, "high": 4, "log": False, "step": 1, "powers_of_two": False}
NAME = {"type": "Choice", "options": ["adamw", "sgd"]}
LOSS = [{"metric": "val/loss", "direction": "minimize", "select": "last"}]


@pytest.fixture
def ledger(tmp_path):
    opened = open_crafted(tmp_path / "ledger.db")
    yield opened
    opened.close()


def kinds(ledger, confirmed: list[Any] | None = None, **space: Any) -> list[str]:
    with ledger.write() as connection:
        connection.execute(update(tables.studies).values(identity={"space": space}))
    with ledger.read() as connection:
        return [one["kind"] for one in cautions(snapshot.read(connection, "crafted"), confirmed or [])]


@pytest.mark.parametrize(
    ("dimension", "value", "warned"),
    [
        (LR, 1e-4, True),
        (LR, 1.14e-4, True),  # 1.9 % of three decades above the lower end
        (LR, 1.16e-4, False),
        (LR, 0.0999, True),
        ({**LR, "log": False}, 0.0019, True),
        ({**LR, "log": False}, 0.0025, False),
        (WIDTH, 256, True),
        (WIDTH, 128, False),
        (DEPTH, 4, False),  # of four values a fourth are at the end by chance
        ({**DEPTH, "high": 5}, 5, True),
        ({**LR, "low": 0.05, "high": 0.05}, 0.05, False),
    ],
)
def test_the_best_at_an_edge_of_its_range(ledger, dimension, value, warned):
    put_trial(ledger, 0, "complete", (0.5,), params={"x": value})
    put_trial(ledger, 1, "complete", (0.4,), params={"x": dimension["low"]})  # not the best: no edge of its own counts
    assert ("edge" in kinds(ledger, x=dimension)) is warned


def test_cautions_are_of_the_trial_that_the_report_names(ledger):
    put_trial(ledger, 0, "complete", (0.5,), params={"x": 0.05})
    put_trial(ledger, 1, "complete", (0.4,), params={"x": 1e-4})
    assert kinds(ledger, x=LR) == []
    with ledger.read() as connection:
        assert [one["kind"] for one in cautions(snapshot.read(connection, "crafted"), [], 1)] == ["edge"]


@pytest.mark.parametrize(("times", "trials", "warned"), [(2, 10, True), (3, 10, False), (2, 9, False), (0, 10, True)])
def test_an_option_that_was_hardly_tried(ledger, times, trials, warned):
    for number in range(trials):
        put_trial(ledger, number, "complete", (0.5,), params={"x": "sgd" if number < times else "adamw"})
    assert ("unexplored" in kinds(ledger, x=NAME)) is warned


def test_an_option_of_an_inactive_choice_is_not_missed(ledger):
    for number in range(12):
        put_trial(ledger, number, "complete", (0.5,), params={})
    assert kinds(ledger, x=NAME) == []


def confirmation(held_out: float, error: float | None) -> list[Any]:
    spread = {"mean": held_out, "error": error, "count": 3}
    row = {"trial": 0, "selected": 0.9, "held_out": spread, "again": spread}
    return [{"metric": "val/accuracy", "hold_out": "test/accuracy", "rows": [row]}]


@pytest.mark.parametrize(
    ("held_out", "error", "warned"),
    [(0.87, 0.014, True), (0.87, 0.016, False), (0.95, 0.001, False), (0.5, None, False)],
)
def test_a_selected_value_above_the_confirmed_one(ledger, held_out, error, warned):
    put_trial(ledger, 0, "complete", (0.9,))
    assert ("overselected" in kinds(ledger, confirmation(held_out, error))) is warned


@pytest.mark.parametrize(("held_out", "others", "warned"), [(0.80, 10, True), (0.88, 10, False), (0.80, 9, False)])
def test_a_held_out_value_far_below_what_is_usual(ledger, held_out, others, warned):
    """The others lose 0.01 on average, with a standard deviation of about 0.01."""
    put_trial(ledger, 0, "complete", (0.9,), metrics={"test/accuracy": held_out})
    for number in range(1, others + 1):
        put_trial(ledger, number, "complete", (0.8,), metrics={"test/accuracy": 0.79 + 0.01 * (-1) ** number})
    assert ("overselected" in kinds(ledger)) is warned


def test_a_perfect_value_may_be_leaked(ledger, tmp_path):
    put_trial(ledger, 0, "complete", (1.0,))
    assert kinds(ledger) == ["leaked"]
    put_trial(ledger, 1, "complete", (0.9999,))
    loss = open_crafted(tmp_path / "loss.db", objectives=LOSS)
    put_trial(loss, 0, "complete", (0.5,), values=[2e-6])
    assert kinds(loss) == []
    put_trial(loss, 1, "complete", (0.5,), values=[0.0])
    assert kinds(loss) == ["leaked"]
    reward = open_crafted(tmp_path / "reward.db", objectives=[{**LOSS[0], "metric": "reward", "direction": "maximize"}])
    put_trial(reward, 0, "complete", (0.5,), values=[1.0])  # a reward may well be 1
    assert kinds(reward) == []


@pytest.mark.parametrize(("bad", "ended", "warned"), [(2, 7, True), (2, 8, False), (3, 3, False), (4, 4, True)])
@pytest.mark.parametrize("state", ["infeasible", "failed"])
def test_many_trials_in_vain(ledger, state, bad, ended, warned):
    for number in range(ended):
        put_trial(ledger, number, state if number < bad else "complete", (0.5,))
    assert (state in kinds(ledger)) is warned


@pytest.mark.parametrize(
    ("complete", "stopped", "warned"), [(1, 5, True), (4, 0, True), (5, 20, False), (3, 0, False), (0, 6, False)]
)
def test_a_best_one_of_few(ledger, complete, stopped, warned):
    for number in range(complete + stopped):
        put_trial(ledger, number, "complete" if number < complete else "pruned", (0.5,))
    assert ("few" in kinds(ledger)) is warned


def test_drift_and_differing_replays(ledger):
    trial = put_trial(ledger, 0, "complete", (0.5,))
    assert kinds(ledger) == []
    with ledger.write() as connection:
        event = {"study_id": 1, "revision": 1, "at": 0.0}
        drift = {"kind": "drift", "fields": {"changed": ["the code changed"]}, "uid": "a"}
        connection.execute(insert(tables.events).values(event | drift))
        metrics = {"val/loss": {"first": 0.5, "replay": 0.75}, "other": {"first": 8.0, "replay": 9.0}}
        again = {"trial_id": trial, "kind": "replay_differs", "fields": {"metrics": metrics}, "uid": "b"}
        connection.execute(insert(tables.events).values(event | again))
        gone = {"trial_id": trial, "kind": "worker_lost", "fields": {"why": "pid 14 on box is gone"}, "uid": "c"}
        connection.execute(insert(tables.events).values(event | gone))
    assert kinds(ledger) == ["drift", "replays"]
    with ledger.read() as connection:
        shown = snapshot.read(connection, "crafted")
    [_, replays] = cautions(shown, [])
    said = "1 report of trial 0 had another value when an attempt trained it again (val/loss 0.5 and then 0.75), so "
    assert replays["text"].startswith(said)
    assert "hpo show 0 --study crafted" in replays["next"]
    assert cost(shown)["lost"]["why"] == ["trial 0: pid 14 on box is gone"]


def test_trials_that_stopped_where_complete_ones_end(ledger):
    """Trial 3 declares four epochs, so its third is not its end."""
    ends = [("complete", 3), ("pruned", 2), ("pruned", 3), ("pruned", 3)]
    ids = [put_trial(ledger, number, state, (0.5, 0.4, 0.3)[:epochs]) for number, (state, epochs) in enumerate(ends)]
    assert "late" not in kinds(ledger)
    with ledger.write() as connection:
        undeclared = update(tables.asks).where(tables.asks.c.trial_id.in_(ids[:3])).values(config={"lr": 0.1})
        connection.execute(undeclared)
    with ledger.read() as connection:
        [caution] = [found for found in cautions(snapshot.read(connection, "crafted"), []) if found["kind"] == "late"]
    assert caution["text"] == "1 trial stopped at epoch 3, where complete ones end"
    assert "declare num_epochs=3" in caution["next"]
