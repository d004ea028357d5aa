"""The replay of `bench/search.py` on tables small enough to be worked out by hand."""

import argparse
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from places import ROOT

from bench.search import main, ratio, until, versus
from bench.searchers import Ours, methods
from bench.tables import SETS, Table, halved, replay

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
    "name", ["random", "random + asha-promote", "tpe + asha", "the default", "optuna tpe + halving", "freeze-thaw"]
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
