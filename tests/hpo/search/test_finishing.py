"""The choice of the stopped trials that are trained to their end, and what small studies name by it."""

from __future__ import annotations

import argparse
import math
import random

import pytest

from bench.named import Named, classes, search
from bench.searchers import Ours
from hpo.search.finishing import FEWEST, ahead, is_within, reserved, trained
from hpo.search.pareto import dominates
from hpo.search.ranking import losses
from hpo.search.strategies.registry import DEFAULT, complete

LOSS, SCORE = {"metric": "loss", "direction": "minimize"}, {"metric": "score", "direction": "maximize"}
NAN = math.nan


def test_those_ahead_come_best_first_and_equal_ones_stay_behind():
    stopped = {1: [0.4], 2: [0.5], 3: [0.5], 4: [0.3], 5: [NAN], 6: [-math.inf]}
    assert ahead([LOSS], {0: [0.5], 7: [NAN]}, stopped) == [4, 1]
    assert ahead([SCORE], {0: [0.4]}, stopped) == [2, 3]
    assert ahead([LOSS], {}, {1: [0.4], 2: [0.3]}) == [2, 1]
    assert ahead([LOSS], {0: [NAN]}, {1: [0.4]}) == [1]


def test_of_the_time_one_trial_at_least_and_at_most_a_tenth_is_reserved():
    assert reserved([], 100.0) == 0.0
    assert reserved([40.0, 1.0], 100.0) == 40.0, "the first may take more than a tenth"
    assert reserved([60.0, 1.0], 100.0) == 0.0, "but not more than half"
    assert reserved([4.0, 5.0, 3.0, 1.0], 100.0) == 9.0, "trials have their turn in order"


def test_of_several_objectives_none_that_is_dominated_is_ahead():
    draws = random.Random(1)
    for _ in range(200):
        values = {number: [draws.randint(0, 4), draws.randint(0, 4)] for number in range(8)}
        complete = {number: values[number] for number in range(4)}
        stopped = {number: values[number] for number in range(4, 8)}
        chosen = ahead([LOSS, SCORE], complete, stopped)
        worse = losses([LOSS, SCORE], values)
        expected = {n for n in stopped if not any(dominates(worse[other], worse[n]) for other in values)}
        assert {*chosen} == expected


def test_a_phase_trains_a_few_trials_and_then_a_tenth_of_the_epochs():
    assert all(is_within(50, trials, 50 * trials, 10) for trials in range(FEWEST))
    assert not is_within(50, FEWEST, 150, 1000) and is_within(50, FEWEST, 150, 2000)


def test_a_trial_that_is_judged_by_its_best_epoch_keeps_an_earlier_one():
    by_best = [{**LOSS, "select": "best"}]
    assert not trained(by_best, [0.2], [0.3]) and trained(by_best, [0.3], [0.3]) and trained(by_best, [NAN], [0.3])
    assert trained([{**LOSS, "select": "last"}], [0.2], [0.3])


def readme(point, number):
    """Returns the losses of a function such as README's example by the coordinates of lr and width."""
    lr, width = 10 ** (-4 + 3 * point[0]), round(4 + 60 * point[1])
    curve = [abs(1 - epoch * lr * width) for epoch in range(1, 10)]
    return curve, curve[-1]


def given(select: str, studies: int, **options) -> argparse.Namespace:
    asked = {"tables": None, "sampler": "random", "select": select, "finish": "auto", "strategy": DEFAULT}
    return argparse.Namespace(**asked, studies=studies, **options)


def named(seed: int, finish: bool) -> Named:
    ours = Ours("random", complete(DEFAULT, math.inf), 2, seed, 4, "last")  # it declares no number of epochs
    return search(readme, 9, 20, ours, "last", finish=finish)


def test_readmes_example_names_nothing_that_a_stopped_trial_had_beaten():
    without, phased = ([named(seed, finish) for seed in range(40)] for finish in (False, True))
    assert sum(study.ahead for study in phased) == 0
    assert sum(study.ahead for study in without) > 0, "so the phase has something to do"
    assert sum(study.regret for study in phased) < sum(study.regret for study in without)


@pytest.mark.parametrize("select", ["best", "last"])
def test_no_stopped_trial_of_small_studies_is_ahead_of_the_best(select):
    asked = given(select, 270, epochs=[5, 9, 18], trials=[6, 12, 25])
    cells = [cell for _, some in classes(asked) for cell in some]
    assert len(cells) == 270 and sum(study.ahead for study, _ in cells) == 0
    ours, none = (sum(cell[side].regret for cell in cells) for side in (0, 1))
    assert ours < 1.1 * none, "so few studies tell it to a tenth; docs/performance.md has the ratio of 4,779"
