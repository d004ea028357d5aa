"""The data of a report: what it holds of studies of every kind; its figures are those of the other commands."""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from crafted import change_trial, config_of, open_crafted, put_trial
from sqlalchemy import insert, update

from hpo.analysis.plots import figures, importance
from hpo.analysis.plots.importance import EVALUATORS
from hpo.analysis.plots.optuna_study import complete_trials, to_optuna
from hpo.analysis.report import data, importances, snapshot
from hpo.analysis.report.cost import covered
from hpo.analysis.report.curves import chosen, thin
from hpo.analysis.report.timeline import breaks
from hpo.analysis.results.best import best_trials
from hpo.analysis.results.compare import compare
from hpo.ledger import Ledger, queries
from hpo.ledger.database import tables
from hpo.storage.home import Home

SPACE = {
    "train.optim.lr": {"type": "Float", "low": 1e-4, "high": 1.0, "log": True, "step": None, "tier": 1, "when": {}},
    "train.optim.name": {"type": "Choice", "options": ["adamw", "sgd"], "tier": 1, "when": {}},
}
TWO = [
    {"metric": "val/accuracy", "direction": "maximize", "select": "last"},
    {"metric": "size", "direction": "minimize", "select": "last"},
]


@pytest.fixture
def ledger(tmp_path):
    opened = open_crafted(tmp_path / "ledger.db")
    with opened.write() as connection:
        connection.execute(update(tables.studies).values(identity={"space": SPACE}))
    yield opened
    opened.close()


def told(ledger: Ledger, name: str = "crafted") -> dict[str, Any]:
    """The report, which must be JSON without NaN."""
    home = Home.at(Path(ledger.url.removeprefix("sqlite:///")).parent)
    report = data.read(ledger, home, name).to_json()
    return json.loads(json.dumps(report, allow_nan=False))


def params(lr: float, name: str = "adamw") -> dict[str, Any]:
    return {"train.optim.lr": lr, "train.optim.name": name}


def attempt(ledger: Ledger, trial: int, fence: int, begin: float, end: float | None, **columns: Any) -> None:
    row = {"trial_id": trial, "fence": fence, "worker_id": "w", "started_at": begin, "ended_at": end, **columns}
    with ledger.write() as connection:
        connection.execute(insert(tables.attempts).values(row))


def replace_attempt(ledger: Ledger, trial: int, begin: float, end: float | None, **columns: Any) -> None:
    with ledger.write() as connection:
        mine = tables.attempts.c.trial_id == trial
        connection.execute(update(tables.attempts).where(mine).values(started_at=begin, ended_at=end, **columns))


def test_an_empty_study_has_no_answer_and_no_figures(ledger):
    report = told(ledger)
    assert report["answer"]["best"] == [] and "no complete trial" in report["answer"]["lacking"]
    assert report["trials"]["number"] == [] and report["curves"]["lines"] == {} and report["cautions"] == []
    assert report["importances"]["lacking"] == {
        "val/accuracy": "it takes complete trials with different values, and none is complete"
    }
    assert report["timeline"]["spans"]["trial"] == [] and report["cost"]["saved"]["share"] is None


def test_a_study_whose_trials_have_all_failed_says_why(ledger):
    for number in range(4):
        put_trial(ledger, number, "failed", error="ValueError: no data\nin detail")
    report = told(ledger)
    assert report["answer"]["best"] == [] and report["trials"]["why"] == ["ValueError: no data"] * 4
    assert [one["kind"] for one in report["cautions"]] == ["failed"]
    assert "4 of 4 ended trials have failed; 4 of them: ValueError: no data" in report["cautions"][0]["text"]


def test_a_trial_that_was_paused_and_never_continued_says_why(ledger):
    trial = put_trial(ledger, 0, "pruned", (0.5,))
    put_trial(ledger, 1, "complete", (0.5,))
    decision = {"trial_id": trial, "step": 10, "verdict": "pause", "reason": "rank 3 of 4 at rung 0"}
    decision |= {"fold": 0, "params": {}, "strategy": "asha-promote", "fence": 1, "revision": 1}
    with ledger.write() as connection:
        connection.execute(insert(tables.decisions).values(decision))
    assert told(ledger)["trials"]["why"] == ["rank 3 of 4 at rung 0", ""]


def test_one_complete_trial_is_the_answer(ledger):
    put_trial(ledger, 0, "complete", (0.5, 0.75), params=params(0.1))
    report = told(ledger)
    [best] = report["answer"]["best"]
    assert (best["number"], best["values"], best["judged_epoch"]) == (0, {"val/accuracy": 0.75}, 2)
    assert best["train"].startswith("hpo run --study mlp --name crafted-best --trials 1")
    assert "one is complete" in report["importances"]["lacking"]["val/accuracy"]


def test_figures_are_those_of_status_best_and_compare(ledger, tmp_path):
    for number in range(8):
        state = "pruned" if number % 3 == 1 else "complete"
        curve = tuple(0.1 * number + 0.01 * epoch for epoch in range(1 + number % 4))
        put_trial(ledger, number, state, curve, metrics={"test/accuracy": 0.3}, params=params(0.01 * (number + 1)))
    report = told(ledger)
    with ledger.read() as connection:
        status, table = queries.status(connection, "crafted"), compare(connection, "crafted")
        [best] = best_trials(connection, Home.at(tmp_path), "crafted")
    assert report["counts"] == {state: count for state, count in status.trials.items() if count}
    assert (report["cost"]["epochs"], report["cost"]["attempts"]) == (status.epochs_trained, status.attempts)
    found = report["answer"]["best"][0]
    assert (found["number"], found["values"], found["params"]) == (best["number"], best["values"], best["params"])
    assert found["held_out"] == {"val/accuracy": best["judged"]["metrics"]["test/accuracy"]}
    rows = {row["number"]: row for row in table.rows}
    trials = report["trials"]
    for i, number in enumerate(trials["number"]):
        row = rows[number]
        assert trials["values"]["val/accuracy"][i] == row["values.val/accuracy"]
        assert trials["held_out"]["val/accuracy"][i] == row["metrics.test/accuracy"]
        assert (trials["epoch"][i], trials["seconds"][i]) == (row["epoch"], row["seconds"])
        assert trials["settings"]["train.optim.lr"][i] == row["params.train.optim.lr"]
    complete = [row["number"] for row in table.rows if row["state"] == "complete"]
    places = dict(zip(trials["number"], trials["place"], strict=True))
    assert [places[number] for number in complete] == list(range(len(complete)))


def test_what_stopping_has_saved_is_counted_by_hand(ledger):
    """Trials are configured for 4 epochs: 3 and 2 were saved; one trial's epochs nobody knows; one is complete."""
    put_trial(ledger, 0, "complete", (0.1, 0.2, 0.3, 0.4))
    put_trial(ledger, 1, "pruned", (0.1,))
    put_trial(ledger, 2, "pruned", (0.1, 0.2))
    config_of(ledger, put_trial(ledger, 3, "pruned", (0.1,)), {"lr": 0.1})
    saved = told(ledger)["cost"]["saved"]
    assert saved == {"trials": 3, "epochs": 5, "share": 5 / 13, "unknown": 1}


def test_the_cost_of_losses_failures_and_waits(ledger):
    """Seconds 0 to 10 lost at step 30, 12 to 20 again from step 20; 21 to 24 a failure; then one without an end."""
    first = put_trial(ledger, 0, "complete", (0.5,))
    replace_attempt(ledger, first, 0.0, 10.0, outcome="lost", step=30)
    attempt(ledger, first, 2, 12.0, 20.0, outcome="complete", from_step=20, step=40)
    failed = put_trial(ledger, 1, "failed", (0.5, 0.4))
    replace_attempt(ledger, failed, 21.0, 24.0, outcome="user_error")
    replace_attempt(ledger, put_trial(ledger, 2, "running", (0.5,)), 25.0, None)
    report = told(ledger)
    cost = report["cost"]
    assert cost["lost"] == {"attempts": 1, "steps": 10, "seconds": 10.0, "why": []}
    assert cost["failed"] == {"trials": 1, "epochs": 2, "seconds": 3.0}
    assert (cost["busy"], cost["idle"]) == (21.0, 3.0)
    assert report["timeline"]["spans"]["outcome"] == ["lost", "complete", "user_error", "running"]
    assert report["timeline"]["spans"]["end"][-1] is None


def test_lanes_of_one_worker_are_counted_once():
    assert covered([(0.0, 4.0), (1.0, 3.0), (3.5, 6.0), (8.0, 9.0)]) == 7.0 and covered([]) == 0.0


def test_a_study_ends_with_its_last_attempt_unless_one_is_under_way(ledger):
    first = put_trial(ledger, 0, "complete")
    replace_attempt(ledger, first, 100.0, 110.0)
    second = put_trial(ledger, 1, "complete")
    replace_attempt(ledger, second, 101.0, 105.0)
    assert told(ledger)["cost"]["ended"] == 110.0
    replace_attempt(ledger, second, 101.0, None)
    assert told(ledger)["cost"]["ended"] is None


def test_energy_is_power_over_time(ledger):
    trial = put_trial(ledger, 0, "complete", (0.5, 0.6), metrics={"system/gpu_power_w": (300.0, 500.0)})
    replace_attempt(ledger, trial, 0.0, 3600.0, outcome="complete")
    cost = told(ledger)["cost"]
    assert (cost["energy"], cost["measured"]) == (pytest.approx(0.4), 1)


def test_pauses_last_from_one_attempt_to_the_next(ledger):
    trial = put_trial(ledger, 0, "complete", (0.5,))
    replace_attempt(ledger, trial, 0.0, 5.0, outcome="paused")
    attempt(ledger, trial, 2, 9.0, 12.0, outcome="complete")
    waiting = put_trial(ledger, 1, "paused", (0.5,))
    replace_attempt(ledger, waiting, 5.0, 6.0, outcome="paused")
    assert told(ledger)["timeline"]["pauses"] == {"trial": [0, 1], "begin": [5.0, 6.0], "end": [9.0, None]}


def test_a_time_in_which_no_attempt_ran_is_a_break():
    """Of 100 seconds that attempts cover, 6 without any are a break and 4 are not."""
    spans = [(0.0, 40.0), (10.0, 50.0), (54.0, 60.0), (66.0, 110.0)]
    assert breaks(spans) == [(60.0, 66.0)] and breaks(spans[:1]) == [] and breaks([]) == []


def test_the_breaks_of_a_study_are_in_its_timeline(ledger):
    replace_attempt(ledger, put_trial(ledger, 0, "complete", (0.5,)), 100.0, 110.0, outcome="complete")
    replace_attempt(ledger, put_trial(ledger, 1, "complete", (0.5,)), 500.0, 510.0, outcome="complete")
    timeline = told(ledger)["timeline"]
    assert timeline["breaks"] == {"begin": [110.0 - timeline["began"]], "end": [500.0 - timeline["began"]]}


def test_values_that_are_not_finite_are_null_and_never_first(ledger):
    put_trial(ledger, 0, "complete", (0.5, None, 0.6))
    put_trial(ledger, 1, "infeasible", (math.inf,), values=[math.inf])
    report = told(ledger)
    assert report["trials"]["values"]["val/accuracy"] == [0.6, None]
    assert report["curves"]["lines"]["val/accuracy"] == {"0": [0, [0.5, None, 0.6]], "1": [1, [None]]}
    assert report["answer"]["best"][0]["number"] == 0


def test_a_study_without_epochs_has_curves_over_steps(ledger):
    put_trial(ledger, 0, "complete", (0.5, 0.6))
    with ledger.write() as connection:
        connection.execute(update(tables.reports).values(epoch=None))
    curves = told(ledger)["curves"]
    assert (curves["axis"], curves["grids"]) == ("step", [[10, 20]])


def test_several_objectives_have_a_front(tmp_path):
    ledger = open_crafted(tmp_path / "two.db", objectives=TWO)
    for number, (accuracy, size) in enumerate([(0.9, 3.0), (0.8, 1.0), (0.7, 2.0)]):
        put_trial(ledger, number, "complete", (accuracy,), metrics={"size": size}, values=[accuracy, size])
    report = told(ledger)
    assert report["trials"]["front"] == [0, 0, 1] and report["answer"]["front"] == 2
    assert [one["number"] for one in report["answer"]["best"]] == [0, 1]
    assert report["answer"]["again"] == f"hpo best --study crafted --trial 0 --home {tmp_path}"
    ledger.close()


def test_a_study_that_still_runs_says_so(ledger, tmp_path):
    put_trial(ledger, 0, "running", (0.5,))
    with ledger.write() as connection:
        row = {"name": "driver:1", "owner": "x", "fence": 1, "host": "elsewhere", "pid": 1, "pid_started": "y"}
        connection.execute(insert(tables.leases).values(row))
    report = told(ledger)
    assert report["state"] == "running" and report["timeline"]["now"] is not None
    with ledger.write() as connection:
        connection.execute(update(tables.leases).values(owner=None))
    assert told(ledger)["state"] == "interrupted"


def test_importances_need_no_declaration(ledger):
    """The reference leads nowhere: what the ledger has recorded of the space is enough, also where it has none."""
    with ledger.write() as connection:
        spec = {**queries.study_row(connection, "crafted").spec.json, "reference": "/nowhere/gone.py:STUDY"}
        connection.execute(update(tables.studies).values(spec=spec))
    for number in range(12):
        lr = 10.0 ** (-(number % 4) - 0.5)
        put_trial(ledger, number, "complete", (lr,), params=params(lr, "sgd" if number % 2 else "adamw"))
    found = told(ledger)["importances"]
    assert next(iter(found["shares"]["val/accuracy"])) == "train.optim.lr"
    assert sum(found["shares"]["val/accuracy"].values()) == pytest.approx(1)
    with ledger.write() as connection:
        connection.execute(update(tables.studies).values(identity={}))
    bare = told(ledger)["importances"]
    assert next(iter(bare["shares"]["val/accuracy"])) == "train.optim.lr" and bare["lacking"] == {"val/accuracy": ""}
    assert bare["dimensions"]["train.optim.name"]["options"] == ["adamw", "sgd"]


def test_importances_are_those_of_the_whole_study(ledger):
    """They are computed from complete trials alone, which has to change no share of any evaluator."""
    with ledger.write() as connection:
        spec = {**queries.study_row(connection, "crafted").spec.json, "objectives": TWO}
        connection.execute(update(tables.studies).values(spec=spec))
    states = ["complete", "complete", "pruned", "complete", "infeasible", "failed"]
    for number in range(36):
        values = [math.sin(number), float(number % 7)]
        searched = params(10.0 ** (-(number % 4) - 0.5), "sgd" if number % 3 else "adamw")
        trial = put_trial(ledger, number, states[number % 6], (0.5,), params=searched)
        change_trial(ledger, number, values=None if states[number % 6] == "failed" else values)
        assert trial
    with ledger.read() as connection:
        of = snapshot.part(connection, "crafted")
        declaration = importances.recorded(of, importances.descriptions(of))
        complete = complete_trials(connection, declaration, "crafted")
    whole = to_optuna(declaration, None, "crafted", ledger.url)
    for metric in of.metrics:
        for evaluator in EVALUATORS:
            shares = [
                importance.importances(one.study, evaluator, one.loss)
                for one in (figures.subject(whole, metric), figures.subject(complete, metric))
            ]
            assert shares[0] == shares[1] and max(shares[0].values()) > 0, (metric, evaluator)
    assert [trial.values for trial in whole.get_trials() if trial.state.name == "COMPLETE"] == [
        trial.values for trial in complete.get_trials()
    ]


def test_curves_that_are_left_out_are_counted(ledger, monkeypatch):
    """The page says how many trials have curves, and whose it holds; those it holds are whole."""
    for number in range(9):
        put_trial(ledger, number, "complete", (0.1, number / 10), metrics={"val/loss": 1.0} if number else {})
    put_trial(ledger, 9, "waiting")
    every = told(ledger)["curves"]
    assert (every["kept"], every["of"]) == (9, 9) and len(every["lines"]["val/accuracy"]) == 9
    monkeypatch.setattr("hpo.analysis.report.curves.chosen", partial(chosen, most=4))
    few = told(ledger)["curves"]
    assert (few["kept"], few["of"]) == (4, 9) and "8" in few["lines"]["val/accuracy"]
    for metric, lines in few["lines"].items():
        assert lines == {number: every["lines"][metric][number] for number in lines}, metric


def test_settings_are_what_configurations_differ_in(ledger):
    for number, (lr, epochs) in enumerate([(0.1, 4), (0.2, 8)]):
        trial = put_trial(ledger, number, "complete", (0.5,), params={"train.optim.lr": lr})
        config_of(ledger, trial, {"train": {"num_epochs": epochs, "seed": 1, "optim": {"lr": lr}}})
    trials = told(ledger)["trials"]
    assert trials["settings"] == {"train.optim.lr": [0.1, 0.2], "train.num_epochs": [4, 8]}
    assert trials["searched"] == ["train.optim.lr"] and trials["planned"] == [4, 8]


def test_an_inactive_parameter_is_null(ledger):
    put_trial(ledger, 0, "complete", (0.5,), params={"train.optim.name": "adamw"})
    put_trial(ledger, 1, "complete", (0.6,), params={"train.optim.name": "sgd", "train.optim.momentum": 0.9})
    assert told(ledger)["trials"]["settings"]["train.optim.momentum"] == [None, 0.9]


def test_a_trial_without_attempts_is_there_all_the_same(ledger):
    """As of an imported study: nothing here has trained it."""
    put_trial(ledger, 0, "complete", (0.5,))
    with ledger.write() as connection:
        connection.execute(tables.attempts.delete())
    change_trial(ledger, 0, started_at=None)
    report = told(ledger)
    assert report["answer"]["best"][0]["number"] == 0 and report["trials"]["seconds"] == [None]
    assert report["timeline"]["workers"] == [] and report["cost"]["busy"] == 0


def test_a_long_curve_keeps_its_ends_and_extremes():
    curve = [(step, math.sin(step / 50) + (5.0 if step == 777 else 0.0)) for step in range(5000)]
    curve[2500] = (2500, math.nan)
    kept = thin(curve)
    assert len(kept) <= 100 and kept[0] == curve[0] and kept[-1] == curve[-1] and curve[777] in kept
    assert [x for x, _ in kept] == sorted({x for x, _ in kept}) and thin(curve[:100]) == curve[:100]


def test_of_many_trials_the_best_and_a_spread_keep_their_curves():
    places = {number: 9999 - number for number in range(0, 10000, 2)}
    kept = chosen(range(10000), places, most=400)
    assert len(kept) == 400 and set(range(9998, 9798, -2)) <= set(kept)
    others = [number for number in kept if number < 9000]
    assert len(others) > 150 and max(b - a for a, b in pairwise(others)) < 100
