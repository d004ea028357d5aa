"""Trials of several folds, stopped by paired differences, against the same trials trained to their end."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from hpo.errors import UserError
from hpo.search.finishing import ahead_in_part
from hpo.search.pareto import beyond
from hpo.search.strategies.paired import Paired, beyond_t, chance_of_less
from hpo.search.strategies.registry import complete, default, make_strategy
from hpo.search.strategies.table_history import TableHistory

WINDOW = 4


def means(losses) -> list[tuple[int, float]]:
    return [(k, fmean(losses[:k])) for k in range(1, len(losses) + 1)]


def verdict(own, *complete, number: int = 9):
    tables = {n: means(losses) for n, losses in enumerate(complete)} | {number: means(own)}
    return Paired(parts=5).decide(
        TableHistory(number, len(own), tables, dict.fromkeys(range(len(complete)), "complete"))
    )


def search(strategy, losses) -> dict[int, int]:
    """Returns the folds that each trial has trained, one trial after the other."""
    curves = {number: means(row) for number, row in enumerate(losses)}
    folds, tables, states = len(losses[0]), {}, {}
    trained = dict.fromkeys(curves, folds)
    for number, curve in curves.items():
        states[number] = "complete"
        for count in range(1, folds + 1):
            tables[number] = curve[:count]
            history = TableHistory(number, count, tables, states | {number: "running"}, number - WINDOW)
            if count < folds and strategy.wants(count) and strategy.decide(history).kind == "stop":
                states[number], trained[number] = "pruned", count
                break
    return trained


def folded(seed: int, trials: int, folds: int) -> list[list[float]]:
    """Returns losses of trials by folds that differ more than trials do; every other study has heavy tails."""
    draws = np.random.default_rng(seed)
    noise = draws.standard_t(3, (trials, folds)) if seed % 2 else draws.normal(size=(trials, folds))
    quality, hard = draws.exponential(0.5, (trials, 1)), draws.normal(0, 3, folds)
    return (quality + hard + 0.2 * noise).tolist()


@pytest.mark.parametrize("folds", [5, 10])
def test_hardly_any_stopped_trial_would_have_ended_ahead(folds):
    """In 40 studies of 20 trials: the oracle is every trial trained to its end. The stated rate is one in a hundred."""
    strategy = make_strategy(complete(default(folds), math.inf, folds))
    stopped, wrong, spent, studies = 0, 0, 0, 40
    for seed in range(studies):
        losses = folded(seed, 20, folds)
        trained, ends = search(strategy, losses), [fmean(row) for row in losses]
        best = min(ends[number] for number, count in trained.items() if count == folds)
        early = [number for number, count in trained.items() if count < folds]
        stopped += len(early)
        wrong += sum(ends[number] < best for number in early)
        spent += sum(trained.values())
    assert wrong <= stopped / 100, f"{wrong} of {stopped} stopped trials would have ended ahead"
    assert stopped > 20 * studies / 4 and spent < 0.9 * 20 * folds * studies, (stopped, spent)


def test_a_hard_fold_stops_no_trial():
    """The mean of three folds is far above the other's over five, and the differences are in the trial's favour."""
    complete = [1.0, 1.1, 9.0, 1.0, 1.0]
    assert verdict([0.9, 1.0, 8.9], complete).kind == "continue"
    assert verdict([1.5, 1.62, 9.51], complete).kind == "stop"
    assert verdict([1.5, 1.62], complete).kind == "continue", "of two folds none is stopped"
    assert verdict([1.5, 0.9, 9.2], complete).kind == "continue", "the folds disagree"


def test_one_that_is_not_finite_stops_and_stops_none():
    assert verdict([1.0, math.nan], [1.0] * 5).kind == "stop"
    assert verdict([2.0, 2.01, 2.02], [1.0, 1.0, 1.0, math.nan, 1.0]).kind == "continue"


def test_one_that_breaks_a_constraint_stops_none():
    complete = [(k, beyond(1.0, 0.5)) for k in range(1, 6)]
    own = means([2.0, 2.01, 2.02])
    assert Paired(parts=5).decide(TableHistory(1, 3, {0: complete, 1: own}, {0: "complete"})).kind == "continue"


def test_of_several_objectives_one_must_be_behind_in_each():
    def pairs(first, second):
        return [(k, (a, b)) for (k, a), (_, b) in zip(means(first), means(second), strict=True)]

    complete = pairs([1.0] * 5, [1.0] * 5)
    for second, kind in (([2.0, 2.01, 2.02], "stop"), ([0.9, 0.91, 0.92], "continue")):
        own = pairs([2.0, 2.01, 2.02], second)
        assert Paired(parts=5).decide(TableHistory(1, 3, {0: complete, 1: own}, {0: "complete"})).kind == kind


def test_students_t_is_that_of_scipy():
    for freedom in range(1, 30):
        for t in (0.01, 0.5, 1.0, 2.5, 7.0, 40.0):
            assert beyond_t(t, freedom) == pytest.approx(float(stats.t.sf(t, freedom)), rel=1e-6, abs=1e-15)


def test_the_chance_is_the_share_of_ends_that_are_better():
    """By simulation: whoever has folds with such a p under the test ends better as often as p says, or less often."""
    draws = np.random.default_rng(3)
    differences = draws.normal(0, 5, (20000, 1)) + draws.normal(0, 1, (20000, 6))
    chances = np.array([chance_of_less(row[:3].tolist(), 6) for row in differences])
    ends = differences.mean(axis=1) < 0
    for low, high in ((0.0, 0.02), (0.02, 0.1), (0.1, 0.3)):
        chosen = (chances >= low) & (chances < high)
        assert low * 0.8 <= ends[chosen].mean() <= high * 1.1, (low, high, chosen.sum())


def test_a_stopped_trial_is_compared_over_the_folds_that_it_has():
    loss = {"metric": "loss", "direction": "minimize"}
    complete, parts = {0: [0.5]}, {0: {2: [0.2], 3: [0.9]}}
    stopped = {1: [0.3], 2: [0.8], 3: [0.85]}
    assert ahead_in_part([loss], complete, stopped, {1: 2, 2: 3, 3: 3}, parts) == [2, 3]
    assert ahead_in_part([loss], complete, {1: [0.3]}, {1: 4}, parts) == [1], "judged by its end where a fold lacks"


def test_without_folds_it_is_refused_and_with_them_it_is_the_default():
    with pytest.raises(UserError, match=r"set train.folds or train.seeds"):
        complete({"name": "paired"}, 9)
    assert complete(default(5), math.inf, 5) == Paired(parts=5).model_dump()
    assert default(1)["name"] == "asha" and default(3, ["val/loss/low"]) == {"name": "none"}
