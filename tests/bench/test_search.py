"""The replay of `bench/search.py` on tables small enough to be worked out by hand."""

import argparse
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from places import ROOT

from bench.peers import OneEpoch, Rungs
from bench.search import main, ratio, until, versus
from bench.searchers import Ours, Steps, methods
from bench.tables import SETS, Table, halved, replay, replayed

REAL = ROOT.parent / "shared" / "data"
NAN = float("nan")


class Scripted:
    """Proposes `points` in turn, each to its end."""

    def __init__(self, points):
        self.points, self.reports = points, []

    def next(self):
        number = len({number for number, *_ in self.reports})
        return number, self.points[number]

    def report(self, number, epoch, loss, done):
        self.reports.append((number, epoch, loss, done))
        return not done


def test_regret_is_of_the_best_finite_point_of_any_curve():
    table = Table("t", np.array([[0.0], [0.4], [1.0]]), np.array([[5.0, 4.0], [1.0, NAN], [NAN, 3.0]]))
    assert (table.best, table.median) == (1.0, 3.0)
    method = Scripted([[0.9], [0.9], [0.1]])
    assert replay(table, method, 1, (1, 2, 3)) == [1.0, 0.0, 0.0]
    assert [(n, e, done) for n, e, _, done in method.reports] == [
        (0, 1, False),
        (0, 2, True),
        (1, 1, False),
        (1, 2, True),
        (2, 1, False),
    ]
    assert [loss for *_, loss, _ in method.reports][1:3] == [3.0, 1.0]


def test_named_is_a_complete_trial_or_a_better_one_trained_to_its_end():
    """The first trial is complete with 2; the second has 1.5 at its first epoch and ends at 1."""

    class Cut(Scripted):
        def report(self, number, epoch, loss, done):
            return super().report(number, epoch, loss, done) and number == 0

    losses = [[5.0, 4.0, 2.0, 2.0], [1.5, 1.2, 1.0, 1.0], [2.5, 0.5, 0.5, 0.5], [9.0, 8.0, 7.0, 6.0]]
    table = Table("t", np.array([[0.0], [0.4], [0.6], [1.0]]), np.array(losses))
    assert (table.best, table.median) == (0.5, 1.5)
    [(seen, named)] = replayed(table, Cut([[0.0], [0.4]]), 1, (1,))
    assert (seen, named) == (1.5, 1.5), "of the complete trial alone"
    found = replayed(table, Cut([[0.0], [0.4], [0.6], [1.0]]), 1, (1, 2))
    assert found[1] == (1.0, 0.5), "the third, with 2.5, is behind and is not trained on"
    alone = replayed(table, Cut([[0.0], [0.4], [0.6], [1.0]]), 1, (1, 2), finish=False)
    assert [named for _, named in alone] == [1.5, 1.5], "a peer names a complete trial"


def test_points_cost_what_they_took():
    """Of two workers the second reports five points while the first waits for one of 6 units; the budget is 8 units."""
    losses, costs = [[9.0, 2.0], [5.0, 4.0], [7.0, 3.0], [8.0, 8.0]], [[6.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    cube = np.array([[0.0], [0.4], [0.6], [1.0]])
    table, begun = Table("t", cube, np.array(losses), np.array(costs)), iter(enumerate(cube))

    class InOrder(Scripted):
        def next(self):
            return next(begun, None)

    method = InOrder([])
    assert replay(table, method, 2, (1, 2, 4)) == [table.regret(4.0), table.regret(3.0), table.regret(3.0)]
    assert [number for number, *_ in method.reports] == [1, 1, 2, 2, 3], "the point of 6 units ends the budget"


def test_the_regret_stays_once_the_whole_table_was_tried():
    class Hasty(Scripted):
        def report(self, number, epoch, loss, done):
            return super().report(number, epoch, loss, True)

    table = Table("t", np.array([[0.0], [0.4], [1.0]]), np.array([[5.0, 4.0], [1.0, 0.5], [2.0, 3.0]]))
    assert (table.best, table.median) == (0.5, 2.0)
    assert replay(table, Hasty([[0.0], [1.0], [0.4]]), 1, (1, 2, 3)) == [1.0, 1 / 3, 1 / 3]


def made(seed=0, n=120, length=12):
    """A bowl in two dimensions; curves fall to it."""
    rng = np.random.default_rng(seed)
    cube = rng.random((n, 2))
    level = ((cube - 0.3) ** 2).sum(axis=1)
    return Table(f"bowl {seed}", cube, level[:, None] + 1 / np.arange(1, length + 1) + 0.01 * rng.random((n, length)))


@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize(
    "name",
    [
        "random",
        "random + asha-promote",
        "tpe + asha",
        "the default",
        "optuna tpe + halving",
        "optuna random + hyperband from 4",
        "one-epoch top-5 for 10 curves",
        "freeze-thaw",
        "tpe + steps from 2 by 8",
    ],
)
def test_methods_are_driven_alike_and_repeat(name, workers):
    table = made()
    first, again = (replay(table, methods(2, 12, 3)[name](), workers, (2, 4)) for _ in range(2))
    assert first == again and first[0] >= first[1] >= 0.0


def test_freeze_thaw_finds_more_with_as_many_epochs_than_random_search():
    tables = [made(seed) for seed in range(3)]
    found = {
        name: sum(replay(table, methods(2, 12, 0)[name](), 1, (8,))[0] for table in tables)
        for name in ("random", "freeze-thaw")
    }
    assert found["freeze-thaw"] < 0.5 * found["random"]


def test_what_pauses_goes_on_where_it_was():
    method, table = Ours("random", "asha-promote", 2, 0), made()
    replay(table, method, 8, (6,))
    assert all([epoch for epoch, _ in curve] == list(range(1, len(curve) + 1)) for curve in method._curves.values())
    assert "paused" in method._states.values() and max(map(len, method._curves.values())) > 3


class Requests(Rungs):
    """A library that asks for configurations "a", "b" ... at a number of epochs."""

    def __init__(self, asked):
        super().__init__()
        self.asked, self.told = iter(asked), []

    def ask(self):
        request = next(self.asked)
        return request[0], {"a": [0.1], "b": [0.9]}[request[0]], request[1], request

    def tell(self, request, loss):
        self.told.append((*request, loss))


def test_a_raised_fidelity_costs_only_the_further_epochs():
    """8 points are 2 of "a", 2 of "b", 2 further of "a" and one of "b", which fails, and the next of "b"."""
    losses = [[5.0, 4.0, 3.0, 2.0], [9.0, 8.0, NAN, 6.0], [7.0] * 4]
    table = Table("t", np.array([[0.0], [1.0], [0.5]]), np.array(losses))
    library = Requests([("a", 2), ("b", 2), ("a", 4), ("b", 4), ("b", 4)])
    replay(table, library, 1, (2,))
    assert library.told[:3] == [("a", 2, 4.0), ("b", 2, 8.0), ("a", 4, 2.0)]
    assert library.told[3][:2] == ("b", 4) and np.isnan(library.told[3][2]) and len(library.told) == 4


def test_one_epoch_trains_the_best_by_their_first_epoch():
    """Of 2 curves of 4 epochs, 4 go to first epochs; the best two fill the others, and a third goes beyond."""
    method, first = OneEpoch(2, 1, 4, 0), [3.0, NAN, 1.0, 2.0]
    begun = [method.next() for _ in first]
    assert [trial and trial[0] for trial in begun] == [0, 1, 2, 3] and method.next() is None
    for number in (0, 1, 2, 3):
        assert not method.report(number, 1, first[number], False)
    assert [method.next() for _ in range(3)] == [(2, None), (3, None), (0, None)]
    assert [method.report(2, epoch, 0.5, epoch == 4) for epoch in (2, 3, 4)] == [True, True, False]


def test_a_trial_is_told_by_its_best_finite_value():
    """`select="best"` of an objective; where no value is finite the trial is infeasible."""
    method = Ours("random", "none", 2, 0)
    for curve in ([3.0, 1.0, 2.0], [5.0, 4.0, NAN], [NAN, NAN, NAN]):
        number, _ = method.next()
        for epoch, loss in enumerate(curve, start=1):
            method.report(number, epoch, loss, epoch == len(curve))
    told = [method._record(number) for number in range(3)]
    assert [(one.state, one.values) for one in told] == [
        ("complete", (1.0,)),
        ("complete", (4.0,)),
        ("infeasible", None),
    ]


def test_in_ordered_mode_the_workers_change_nothing_but_the_time():
    """With one window for both, 1 and 4 workers start the same trials, and stop them at the same epochs."""
    found = []
    for workers in (1, 4):
        method = Ours("tpe", None, 2, 0, window=6)
        replay(made(), method, workers, (12,))
        ended = next(n for n, state in method._states.items() if state == "running")
        found.append({n: (method._coordinates[n], method._curves[n]) for n in range(ended)})
    common = min(map(len, found))
    assert common > 12 and [found[0][n] for n in range(common)] == [found[1][n] for n in range(common)]
    assert len({len(curve) for _, curve in found[0].values()}) > 1


def promoted(curves, waiting, reductions, levels):
    """The trial that floor(n / reduction) of its rung lets go on, by the plain words of the rule."""
    for rung in reversed(range(len(levels))):
        come = sorted((curve[levels[rung] - 1], n) for n, curve in curves.items() if len(curve) >= levels[rung])
        beyond = levels[rung + 1] if rung + 1 < len(levels) else float("inf")
        for _, number in come[: len(come) // reductions[rung]]:
            if number in waiting and levels[rung] <= len(curves[number]) < beyond:
                return number
    return None


@pytest.mark.parametrize(("window", "first"), [(1, None), (4, None), (7, None), (4, 3)])
def test_each_step_is_decided_from_the_results_a_window_before_it(window, first):
    method = Steps("random", {"name": "asha-promote", "min_epochs": 2, "eta": 2}, 2, 0, window, first)
    replay(made(), method, 1, (12,))
    assert len(method.steps) > 30 and max(method.steps.count(n) for n in method.steps) == 4, "2, 4, 8 and 12 epochs"
    ends = {}
    for step, number in enumerate(method.steps[:-1]):
        before = [ends[place] for place in range(step - window + 1)]
        known = {n: [loss for _, loss in curve] for n, curve in before}
        busy = set(method.steps[max(step - window + 1, 0) : step])
        waiting = {n for n, curve in known.items() if len(curve) < 12} - busy
        begun = len(set(method.steps[:step]))
        assert number == (
            begun if (chosen := promoted(known, waiting, (first or 2, 2, 2), (2, 4, 8))) is None else chosen
        ), step
        ends[step] = number, method._ended[step][1]
        assert len(ends[step][1]) == (2, 4, 8, 12)[method.steps[: step + 1].count(number) - 1]


@pytest.mark.parametrize("sampler", ["random", "freeze-thaw"])
def test_the_steps_do_not_depend_on_the_workers(sampler):
    found = []
    for workers in (1, 4):
        method = Steps(sampler, "asha-promote", 2, 0, window=6)
        replay(made(), method, workers, (8,))
        found.append((method.steps, [method._ended.get(step) for step in range(len(method.steps))]))
    common = min(len(steps) for steps, _ in found) - 6  # the last ones may not have ended
    (steps, ends), (others, other_ends) = found
    assert common > 20
    assert steps[:common] == others[:common] and ends[:common] == other_ends[:common]


def test_equal_regret_is_reached_after_so_many_curves():
    theirs = np.linspace(1.0, 0.0, 30)
    assert until(theirs, theirs) == "10 and 30 curves"
    assert until(np.minimum(theirs, 1.0 * (np.arange(30) < 4)), theirs) == "5 and 5 curves"
    assert until(theirs + 0.1, theirs) == "13 and over 30 curves"


def test_the_default_is_held_against_the_peer_that_comes_nearest(capsys):
    tasks, seeds = [made(seed, 5) for seed in range(3)], range(6)
    of = {
        "the default": lambda task, seed: (1 + seed, 2 if task == "bowl 1" else 1),
        "random": lambda task, seed: (2 + 2 * seed, 8),
        "optuna random + halving": lambda task, seed: (4 + 4 * seed, 4),
        "random + asha": lambda task, seed: (0.1, 0.1),  # ours, no peer
        "syne-tune ASHA": lambda task, seed: (0.1, 0.1),  # of one seed alone
    }
    found = {
        (name, task.name, seed, 1): {"regret": list(map(float, regret(task.name, seed)))}
        for name, regret in of.items()
        for task in tasks
        for seed in (seeds[:1] if name == "syne-tune ASHA" else seeds)
    }
    versus(tasks, found, argparse.Namespace(seeds=seeds, workers=1, half=None))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", the default over ")[1].split(" [")[0] for line in lines] == [
        "random, all: 0.50",
        "random, choose: 0.50",
        "random, report: 0.50",
        "optuna random + halving, all: 0.33",
        "optuna random + halving, choose: 0.25",
        "optuna random + halving, report: 0.50",
    ]
    assert [line.rsplit(", of ")[1] for line in lines] == 2 * ["18 cells", "12 cells", "6 cells"]


def test_seeds_drawn_whole_widen_the_interval_where_tasks_share_luck():
    luck = np.repeat(np.random.default_rng(1).uniform(0.2, 2.0, (20, 1)), 6, axis=0)  # 20 seeds of 6 tasks
    ours, theirs = luck, np.ones((120, 1))

    def width(shown):
        low, high = shown.split("[")[1].rstrip("]").split(", ")
        return float(high) - float(low)

    by_seeds = ratio(ours, theirs, groups=[k // 6 for k in range(120)])
    assert by_seeds.split(" ")[0] == ratio(ours, theirs).split(" ")[0] == f"{luck.mean():.2f}"
    assert width(by_seeds) == pytest.approx(6**0.5 * width(ratio(ours, theirs)), rel=0.1)
    assert ratio(ours, theirs, groups=range(120)) == ratio(ours, theirs)


def test_methods_can_be_named_on_the_command_line():
    assert not [name for name in methods(2, 12, 3) if "," in name]


def test_the_commands_of_the_page_run_and_an_empty_cache_says_so(tmp_path, monkeypatch, capsys):
    """Each --methods that docs/performance.md gives is taken; where a cache has nothing, no empty table is printed."""
    page = (ROOT / "docs" / "performance.md").read_text()
    given = re.findall(r"--methods ([\w,-]+)", page.replace("--methods NAME", ""))
    assert set(given) == {"cached"} and "in the place of `all`" not in page
    monkeypatch.setattr(
        sys, "argv", ["search.py", "--tables", "no", "--methods", "cached", "--cache", str(tmp_path / "c")]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "has no cell; leave --methods out" in capsys.readouterr().err


def test_halves_part_the_tasks():
    tasks = [made(seed, 5) for seed in range(5)]
    parts = [[task.name for task in halved(tasks, half)] for half in ("choose", "report", None)]
    assert parts == [["bowl 0", "bowl 2", "bowl 4"], ["bowl 1", "bowl 3"], [f"bowl {k}" for k in range(5)]]


@pytest.mark.usefixtures("process")
@pytest.mark.skipif(not (REAL / "taskset").exists(), reason="runs with the tables of learning curves in ../shared/data")
def test_the_command_goes_on_from_its_cache(tmp_path):
    cache = tmp_path / "cells.jsonl"
    given = ["--tables", str(REAL), "--half", "choose", "--sets", "TaskSet", "--tasks", "1", "--cache", str(cache)]

    def bench(seeds):
        line = [
            sys.executable,
            "bench/search.py",
            *given,
            "--seeds",
            seeds,
            "--methods",
            "random",
            "--against",
            "random",
        ]
        return subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert "   1 cells" in bench("1")
    rows = [json.loads(line) for line in cache.read_text().splitlines()]
    rows[0]["regret"] = [7.0, 7.0]
    cache.write_text(json.dumps(rows[0]) + "\n")
    assert "   2 cells" in bench("2")
    assert len(cache.read_text().splitlines()) == 2 and '"regret": [7.0, 7.0]' in cache.read_text()


@pytest.mark.skipif(not (REAL / "taskset").exists(), reason="runs with the tables of learning curves in ../shared/data")
@pytest.mark.parametrize(("kind", "count", "shape"), [("LCBench", 17, (1000, 52)), ("TaskSet", 6, (1000, 51))])
def test_the_real_tables_are_as_their_papers_have_them(kind, count, shape):
    tables = list(SETS[kind](REAL))
    assert len(tables) == count
    for table in tables:
        assert table.curves.shape == shape and table.median > table.best
        assert table.cube.min() == 0.0 and table.cube.max() == 1.0
