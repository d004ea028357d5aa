"""Studies with several objectives and constraints: what is best, in every place that says so."""

from __future__ import annotations

import json
import math
import re

import mlflow
import pytest
from places import HARNESS, ROOT
from rounds import rounds
from sqlalchemy import select
from study_runs import drive
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.declaration.references import load
from hpo.errors import UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.database.tables import decisions, trials
from hpo.ledger.history import Curves
from hpo.search.strategies.hyperband import Hyperband
from hpo.search.strategies.registry import STRATEGIES, check_several, make_strategy
from hpo.space.objective import Constraint, Objective
from hpo.storage.home import Home
from hpo.workers.executors.local import Local
from trainer.report import Outcome

pytestmark = pytest.mark.whole

SEVERAL = str(HARNESS / "several_study.py")


def hpo(*arguments: str, home: Home, code: int = 0):
    result = CliRunner().invoke(app, [*arguments, "--home", str(home.root)])
    assert result.exit_code == code, (result.output, result.stderr)
    return result


@pytest.fixture(scope="module")
def searched(tmp_path_factory, process) -> Home:
    home = Home(tmp_path_factory.mktemp("several"))
    flags = ("--trials", "30", "--executor", "inline", "--window", "4", "--finish", "none")
    flags += ("--seed", "3")  # a first trial out of bounds
    result = hpo("run", "--study", SEVERAL, *flags, home=home)
    assert "on the front: trial" in result.output
    return home


@pytest.fixture(scope="module")
def rows(searched) -> list[dict]:
    with Ledger(searched.storage).read() as connection:
        return queries.trial_rows(connection, 1)


def brute_front(rows) -> list[int]:
    """By the values of complete trials: (loss, accuracy)."""
    complete = {row.number: row.values for row in rows if row.state == "complete"}
    return [
        n
        for n, (loss, accuracy) in complete.items()
        if not any(
            other[0] <= loss and other[1] >= accuracy and tuple(other) != (loss, accuracy)
            for other in complete.values()
        )
    ]


def test_trials_that_break_a_bound_are_infeasible_with_their_values(rows):
    assert {row.state for row in rows} == {"complete", "pruned", "infeasible"}
    for row in rows:
        beyond = (10.0 * row.params["size"] - 120) / 120
        assert row.violations == [pytest.approx(beyond)]
        assert len(row.values) == 2
        if row.state == "infeasible":
            assert beyond > 0 and row.error == f"size {10 * row.params['size']} is above 120."
        elif row.state == "complete":
            assert beyond <= 0


def test_best_is_the_front_and_one_of_it_by_its_number(searched, rows):
    front = brute_front(rows)
    assert len(front) > 1
    found = json.loads(hpo("best", "--json", home=searched).stdout)
    assert sorted(one["number"] for one in found) == front
    losses = [one["values"]["val/loss"] for one in found]
    assert losses == sorted(losses) and [one["value"] for one in found] == losses
    text = hpo("best", home=searched).stdout
    assert all(f"\n  {number} " in text for number in front) and "val/accuracy" in text
    chosen = json.loads(hpo("best", "--trial", str(front[-1]), "--json", home=searched).stdout)
    assert chosen == next(one for one in found if one["number"] == front[-1])
    other = next(row.number for row in rows if row.number not in front)
    assert "is not one of the best" in hpo("best", "--trial", str(other), home=searched, code=2).stderr
    assert "there is more than one" in hpo("best", "--to", "x.yaml", home=searched, code=2).stderr


def test_status_and_compare_say_the_front(searched, rows):
    front = brute_front(rows)
    status = json.loads(hpo("status", "--json", home=searched).stdout)
    assert status["best"] is None and sorted(one["number"] for one in status["front"]) == front
    assert "on the front: trials" in hpo("status", home=searched).stdout
    table = json.loads(hpo("compare", "--json", "--top", "30", home=searched).stdout)
    assert sorted(row["number"] for row in table if row["front"] == 0) == front
    states = [row["state"] for row in table]
    assert states == sorted(states, key=lambda state: state != "complete")
    complete = [row["front"] for row in table if row["state"] == "complete"]
    assert complete == sorted(complete) and all(row["front"] is None for row in table[len(complete) :])


def test_mlflow_has_the_front_in_the_parent_and_values_in_the_children(searched, rows):
    hpo("verify", home=searched)
    client = mlflow.MlflowClient(searched.tracking_uri)
    [experiment] = [one for one in client.search_experiments() if one.name == "several"]
    runs = client.search_runs([experiment.experiment_id], max_results=100)
    [parent] = [run for run in runs if run.data.tags["hpo.kind"] == "study"]
    values = {row.number: row.values for row in rows}
    shown = json.loads(parent.data.tags["hpo.front.values"])
    assert {int(number): own for number, own in shown.items()} == {n: values[n] for n in brute_front(rows)}
    assert "hpo.best.trial" not in parent.data.tags
    children = [run for run in runs if run is not parent]
    assert {run.data.tags["hpo.state"] for run in children} > {"complete", "pruned"}
    for run in children:
        told = tuple(run.data.metrics.get(f"objective/{name}") for name in ("val/loss", "val/accuracy"))
        complete = run.data.tags["hpo.state"] == "complete"
        assert told == (tuple(values[int(run.data.tags["hpo.trial"])]) if complete else (None, None))


def test_metrics_json_has_each_objective_and_how_far_beyond_the_bounds(searched, rows):
    for row in rows:
        found = json.loads((searched.checkpoints("several", row.number) / "metrics.json").read_text())
        assert list(found["objective"].values()) == row.values
        assert found["violations"] == {"size": row.violations[0]}


def test_an_optuna_study_has_the_same_front_and_the_constraints(searched, rows):
    made = load(SEVERAL).to_optuna(searched)
    assert sorted(trial.number for trial in made.best_trials) == brute_front(rows)
    for row in rows:
        trial = made.trials[row.number]
        assert trial.constraints == {"size": row.violations[0]}
        if row.state != "pruned":
            assert trial.values == row.values


@pytest.mark.parametrize("metric", ["val/loss", "val/accuracy"])
def test_learning_curves_are_drawn_of_the_objective_that_is_named(searched, rows, tmp_path, monkeypatch, metric):
    from matplotlib.figure import Figure

    save, seen = Figure.savefig, []

    def looked_at(figure, *given, **options):
        [axes] = figure.axes
        seen.append((axes.get_ylabel(), sorted(tuple(line.get_ydata()) for line in axes.lines)))
        save(figure, *given, **options)

    monkeypatch.setattr(Figure, "savefig", looked_at)
    hpo("plot", "curves", "--metric", metric, "--to", str(tmp_path / metric.replace("/", "-")), home=searched)
    ledger = Ledger(searched.storage)
    curves: dict[int, list[float]] = {}
    with ledger.read() as connection:
        for number, _, _, epoch, value in queries.curves(connection, 1, [metric]):
            if epoch is not None:
                curves.setdefault(number, []).append(value)
    ledger.close()
    assert seen == [(metric, sorted(tuple(curve) for curve in curves.values()))]


@pytest.mark.usefixtures("process")
def test_verify_finds_complete_trials_without_values_or_beyond_a_bound(tmp_path):
    home = Home(tmp_path / "home")
    hpo("run", "--study", SEVERAL, "--trials", "6", "--executor", "inline", "--strategy", "none", home=home)
    ledger = Ledger(home.storage)
    with ledger.read() as connection:
        done = connection.execute(select(trials.c.number).where(trials.c.state == "complete")).scalars().all()
    for number, column, value, words in (
        (done[0], "values", [0.5], "is complete, and its values are [0.5] for 2 objectives"),
        (done[1], "violations", [0.25], "is complete, but breaks a constraint by 0.25"),
    ):
        with ledger.write() as connection:
            connection.execute(trials.update().where(trials.c.number == number).values({column: value}))
        assert f"trial {number} {words}" in hpo("verify", home=home, code=1).stdout


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(
    "sampler", ["tpe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nsga2", "nsga3", "auto"))]
)
def test_one_and_two_workers_and_parts_give_the_same_study(tmp_path, sampler):
    flags = {"reference": SEVERAL, "window": 4, "sampler": sampler, "seed": 3}
    digest, status, state, _ = drive(Home(tmp_path / "one"), trials=16, **flags)
    assert state == "complete" and status.trials["pruned"] and status.trials["infeasible"]
    drive(Home(tmp_path / "two"), Local(2), trials=7, **flags)
    again, _, _, _ = drive(Home(tmp_path / "two"), Local(2), trials=16, name="several")
    assert again == digest


@rounds(
    ("flags", "words"),
    [
        (["--strategy", "median"], "strategy 'median' takes one objective and the study has 2: choose one of none"),
        (["--strategy", "pasha"], "strategy 'pasha' takes one objective"),
        (["--sampler", "cmaes"], "sampler 'cmaes' takes one objective and the study has 2: choose nsga2"),
    ],
)
def test_what_cannot_rank_by_several_is_refused_at_once(tmp_path, flags, words):
    home = Home(tmp_path / "home")
    assert words in hpo("run", "--study", SEVERAL, "--trials", "3", *flags, home=home, code=2).stderr
    assert not home.root.exists()


@pytest.mark.parametrize(
    "strategy",
    [
        "asha-promote",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bohb", "hyperband-promote", "halving", "hyperband")),
    ],
)
def test_rungs_rank_by_non_domination_under_every_strategy_that_has_them(tmp_path, strategy):
    home = Home(tmp_path / "home")
    _, status, state, _ = drive(home, trials=12, reference=SEVERAL, strategy=strategy)
    assert state == "complete" and status.front and status.trials["complete"] < 12
    with Ledger(home.storage).read() as connection:
        assert sorted(one.number for one in status.front) == brute_front(queries.trial_rows(connection, 1))


@rounds("strategy", STRATEGIES)
def test_the_guide_says_which_strategies_take_several(strategy):
    guide = (ROOT / "docs" / "guide" / "objectives.md").read_text(encoding="utf-8")
    [ranking] = re.findall(r"The strategies ([^.]*?) take\s+several\s+objectives", guide)
    if strategy in re.findall(r"`(.+?)`", ranking):
        check_several(make_strategy(strategy), 2)
    else:
        with pytest.raises(UserError, match=f"strategy '{strategy}' takes one objective and the study has 2"):
            check_several(make_strategy(strategy), 2)


@pytest.mark.parametrize("strategy", ["asha", "asha-promote"])
def test_at_a_rung_what_breaks_a_bound_is_behind_what_keeps_to_it(tmp_path, strategy):
    """In the order of a rung, as the ledger has it, and so that no decision lets such a trial go on before another."""
    home = Home(tmp_path / "home")
    drive(home, trials=16, reference=SEVERAL, strategy=strategy, sampler="random")
    with Ledger(home.storage).read() as connection:
        rows = {row.number: row for row in queries.trial_rows(connection, 1)}
        curves = Curves(1, [LOSS, ACCURACY], [Constraint("size", upper=120.0)], bounded=True)
        curves.refresh(connection, None)
    order = list(curves.order(1, 2))
    beyond = [max(0.0, rows[n].params["size"] / 12 - 1) for n in order]
    assert beyond == sorted(beyond) and beyond[0] == 0.0 and beyond[-1] > 0, "feasible first, then by the violation"
    assert sorted(order) == sorted(rows)
    if strategy == "asha-promote":  # its rungs are those of all trials, whatever the order they came in
        kept = [n for n in order if rows[n].epoch > 1]
        assert kept and all(rows[n].params["size"] <= 12 for n in kept)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param({"name": "asha", "eta": 2}, id="asha"),
        pytest.param({"name": "halving", "eta": 2}, id="halving", marks=pytest.mark.slow),
        pytest.param({"name": "hyperband", "eta": 3, "max_epochs": 9, "seed": 5}, id="hyperband"),
    ],
)
def test_what_breaks_a_bound_passes_no_rung_that_stops_what_keeps_to_it(tmp_path, strategy):
    """As the study ran: of each three trials one is good, one bad, and one better than both but for its size."""
    good, bad, broken = {"x": 0.1, "y": 0.1, "size": 8}, {"x": 0.5, "y": 0.9, "size": 8}, {"x": 0, "y": 0, "size": 16}
    home, count = Home(tmp_path / "home"), 18
    study = tmp_path / "bounded.py"
    study.write_text(
        "from dataclasses import replace\nfrom hpo import load\n"
        f"STUDY = replace(load({SEVERAL!r}), task='several_study:Several', strategy={strategy!r})\n"
    )
    enqueue = [good, bad, broken] * (count // 3)
    drive(home, trials=count, reference=str(study), sampler="random", enqueue=enqueue)
    with Ledger(home.storage).read() as connection:
        epochs = {row.number: row.epoch for row in queries.trial_rows(connection, 1)}
        query = select(trials.c.number, decisions.c.step).join(trials).where(decisions.c.verdict == "stop")
        stopped = dict(connection.execute(query).all())  # a step is an epoch
    asha, dealt = make_strategy(strategy), dict.fromkeys(epochs, 0)
    if isinstance(asha, Hyperband):
        dealt = {number: asha.bracket(number, asha.brackets(9)) for number in epochs}
    seen = set()
    for bracket, epoch in {(dealt[number], epoch) for number, epoch in stopped.items() if number % 3 == 1}:
        came = [n for n in epochs if n % 3 == 2 and dealt[n] == bracket and epochs[n] >= epoch]
        assert {stopped.get(number) for number in came} <= {epoch}, (bracket, epoch)
        seen |= {bracket for _ in came}
    assert seen == set(dealt.values()) - {2}, "the last of three brackets has no rung before the end"


# The judge


LOSS, ACCURACY = Objective("val/loss"), Objective("val/accuracy", "maximize")
A, B = "val/loss", "val/accuracy"


@rounds(
    ("objectives", "constraints", "reports", "kind", "expected"),
    [
        ([LOSS, ACCURACY], [], [{A: 1.0, B: 0.5}, {A: 2.0, B: 0.4}], "complete", ("complete", [2.0, 0.4], None)),
        (
            [Objective("val/loss", select="best"), ACCURACY],
            [],
            [{A: 1.0, B: 0.5}, {A: 2.0, B: 0.9}],
            "complete",
            ("complete", [1.0, 0.5], None),
        ),
        ([LOSS, ACCURACY], [], [{A: 1.0, B: math.nan}], "complete", ("nonfinite", None, None)),
        ([LOSS, ACCURACY], [], [{A: 1.0, B: math.nan}], "pruned", ("nonfinite", None, None)),
        ([LOSS, ACCURACY], [], [{A: 1.0}], "complete", ("user_error", None, None)),
        ([LOSS, ACCURACY], [], [{A: 1.0}, {B: 1.0}], "complete", ("user_error", None, None)),
        ([LOSS], [Constraint("m", upper=2)], [{A: 1.0, "m": 3.0}], "complete", ("infeasible", [1.0], [0.5])),
        ([LOSS], [Constraint("m", upper=2)], [{A: 1.0, "m": 3.0}, {A: 1.0}], "complete", ("infeasible", [1.0], [0.5])),
        ([LOSS], [Constraint("m", lower=2)], [{A: 1.0, "m": 3.0}], "complete", ("complete", [1.0], [-0.5])),
        ([LOSS], [Constraint("m", upper=2)], [{A: 1.0, "m": 3.0}], "pruned", ("pruned", [1.0], [0.5])),
        ([LOSS], [Constraint("m", upper=2)], [{A: 1.0}], "complete", ("user_error", None, None)),
        ([LOSS], [Constraint("m", upper=2)], [{A: 1.0}], "pruned", ("pruned", [1.0], None)),
        ([LOSS], [Constraint("m", upper=2)], [{A: 1.0, "m": math.nan}], "complete", ("nonfinite", [1.0], None)),
        ([LOSS], [Constraint("m", upper=2)], [{A: 1.0, "m": math.nan}], "pruned", ("nonfinite", [1.0], None)),
        ([Objective("val/loss", select="best")], [], [{A: 1.0}, {A: math.nan}], "pruned", ("pruned", [1.0], None)),
        (
            [Objective("val/loss", select="best")],
            [Constraint("m", upper=2)],
            [{A: 1.0, "m": 1.0}, {A: 2.0, "m": 9.0}],
            "complete",
            ("complete", [1.0], [-0.5]),
        ),
    ],
)
def test_a_trial_is_judged_at_one_epoch_by_all_objectives_and_constraints(
    tmp_path, objectives, constraints, reports, kind, expected
):
    from mirrored import Made

    made = Made(Home(tmp_path / "home"))
    made.ask()
    taken = made.claim()
    for epoch, metrics in enumerate(reports, 1):
        made.report(taken, epoch, metrics, epoch=epoch)
    curves = Curves(made.id, objectives, constraints)
    judged = made.ledger.look(lambda c: curves.judge(c, taken.trial_id, Outcome(kind, len(reports), len(reports))))
    assert (judged.outcome.kind, judged.values, judged.violations) == (
        expected[0],
        expected[1],
        expected[2] if expected[2] is None else pytest.approx(expected[2]),
    )


@pytest.mark.usefixtures("process")
def test_the_front_is_confirmed_and_ablated_by_each_objective(tmp_path):
    """The oracle is the study's own formula: seed s adds 0.01 s to the loss and takes (0.01 s)^2 from the accuracy."""
    home, flags = Home(tmp_path), ("--executor", "inline")
    hpo("run", "--study", SEVERAL, "--trials", "12", "--strategy", "none", *flags, home=home)
    with Ledger(home.storage).read() as connection:
        rows = queries.trial_rows(connection, 1)
    front = brute_front(rows)
    assert len(front) > 2
    shown = hpo("confirm", "--study", "several", "--top", "3", "--seeds", "2", "--json", *flags, home=home)
    found = json.loads(shown.stdout)
    assert [one["metric"] for one in found] == ["val/loss", "val/accuracy"]
    tried = {row["trial"] for row in found[0]["rows"]}
    assert len(tried) == 3 and tried <= set(front)
    by_loss = min(front, key=lambda n: rows[n].values[0])
    by_accuracy = max(front, key=lambda n: rows[n].values[1])
    assert {by_loss, by_accuracy} <= tried, "they cover the front, ends included"
    for one, shift, held in ((found[0], 0.015, 2), (found[1], -0.00025, None)):
        assert {row["trial"] for row in one["rows"]} == tried and set(one["front"]) == tried
        place = found.index(one)
        for row in one["rows"]:
            value = rows[row["trial"]].values[place]
            assert row["selected"] == value
            assert row["again"]["mean"] == pytest.approx(value + shift) and row["again"]["count"] == 2
            assert row["held_out"] is None if held is None else row["gap"] == pytest.approx(value + 2 * shift)
        means = [row["again"]["mean"] for row in one["rows"]]
        assert means == sorted(means, reverse=place == 1)
    text = hpo("confirm", "--study", "several", "--top", "3", "--seeds", "2", *flags, home=home).stdout
    assert "under other seeds no trial is better in every objective than trial" in text
    refused = hpo("confirm", "--study", "several", "--hold-out", "test/loss", home=home, code=2).stderr
    assert "--hold-out test/loss: study 'several' has 2 objectives" in refused

    assert (
        "there is more than one best trial: give --trial"
        in hpo("ablate", "--study", "several", home=home, code=2).stderr
    )
    unknown = hpo("ablate", "--study", "several", "--trial", "99", home=home, code=2).stderr
    assert "study 'several' has no complete trial 99: it has " in unknown
    shown = hpo("ablate", "--study", "several", "--trial", str(by_loss), "--json", *flags, home=home)
    loss, accuracy = json.loads(shown.stdout)
    x, y = rows[by_loss].params["x"], rows[by_loss].params["y"]
    cost = {row["label"]: row["worse"]["mean"] for row in loss["rows"] if row["worse"]}
    assert cost["x"] == pytest.approx(0.5 - x) and cost["y"] == pytest.approx((0.5 - y) / 9)
    assert cost["all defaults"] == pytest.approx(cost["x"] + cost["y"]) and cost["size"] == 0
    cost = {row["label"]: row["worse"]["mean"] for row in accuracy["rows"] if row["worse"]}
    assert cost["x"] == pytest.approx(x**2 - 0.25) and cost["y"] == pytest.approx(0.5 - y)


@pytest.mark.usefixtures("process")
def test_a_study_that_is_nowhere_feasible_says_so(tmp_path):
    """And not that the task is to be mended."""
    study = tmp_path / "narrow.py"
    study.write_text(
        "from hpo import Constraint, Float, Objective, Study\n"
        "from studies.mlp.config import Config\n"
        "STUDY = Study('narrow', Config(), 'studies.mlp.task:MlpTask', {'train.optim.lr': Float(1e-3, 1e-2)},\n"
        "              [Objective('val/loss')], constraints=[Constraint('val/loss', upper=1e-9)])\n"
    )
    flags = ("--trials", "2", "--executor", "inline", "-o", "train.num_epochs=1")
    said = hpo("run", "--study", str(study), *flags, home=Home(tmp_path / "home"), code=5).stderr
    assert "none of 2 trials is feasible, `hpo show 0 --study narrow" in said and "mend" not in said
