"""The race of the best trials under other seeds: who leaves, what it costs, and what it chooses."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from hpo.errors import UserError
from hpo.search.confirming import THRESHOLD, Confirm, Race, is_form, parse, race, survivors

LOSS, SCORE = {"metric": "loss", "direction": "minimize"}, {"metric": "score", "direction": "maximize"}


def test_a_text_is_a_number_of_trials_and_of_seeds():
    assert parse("5x3") == Confirm(5, 3) and parse("none") is None and str(Confirm(5, 3)) == "5x3"
    with pytest.raises(UserError, match="--confirm 5y3: give TRIALSxSEEDS, such as 5x3 for the five best trials"):
        parse("5y3")
    assert not any(map(is_form, ["0x3", "5x0", "5x1001", "5X3", "", None, 5, (5, 3)]))


@pytest.mark.parametrize("wanted", [Confirm(5, 3), Confirm(2, 2), Confirm(1, 4)])
def test_what_there_is_room_for_is_as_much_as_fits(wanted):
    for fits in range(wanted.fits + 2):
        part = wanted.largest(lambda part, fits=fits: part.fits <= fits)
        if part is None:
            assert fits < 2, "two trainings compare a trial with the default"
            continue
        assert part.fits <= fits and part.trials <= wanted.trials and part.seeds <= wanted.seeds
        assert (part == wanted) == (fits >= wanted.fits)
        assert part.trials == 1 or part.trials == wanted.trials or Confirm(part.trials + 1, part.seeds).fits > fits


def test_a_round_begins_once_the_one_before_is_complete():
    fits = {"trial 3": {7: [0.1]}, "default": {}}
    assert race([LOSS], ["trial 3", "default"], [7, 8], fits) == Race(["trial 3", "default"], 0, [("default", 7)])
    fits["default"] = {7: None}
    both = [("trial 3", 8), ("default", 8)]
    assert race([LOSS], ["trial 3", "default"], [7, 8], fits) == Race(["trial 3", "default"], 1, both)
    fits = {"trial 3": {7: [0.1], 8: [0.1]}, "default": {7: None, 8: [0.9]}}
    assert race([LOSS], ["trial 3", "default"], [7, 8], fits) == Race(["trial 3", "default"], 2, [])


@pytest.mark.parametrize("objective", [LOSS, SCORE])
def test_it_leaves_by_the_paired_test_of_the_rounds(objective):
    """Oracle: scipy's paired t-test, with the share of the rounds that are known taken off the variance."""
    draws = np.random.default_rng(0)
    sign, left = 1.0 if objective is LOSS else -1.0, 0
    for _ in range(200):
        hard = draws.normal(0, 5, 3)
        rows = [hard + draws.normal(0, 1, 3) + draws.exponential(2) for _ in range(2)]
        fits = {str(n): {seed: [sign * row[seed]] for seed in range(3)} for n, row in enumerate(rows)}
        state = race([objective], ["0", "1"], range(5), fits)
        first, second = sorted(rows, key=fmean)
        t = stats.ttest_rel(second, first).statistic / math.sqrt(1 - 3 / 5)
        leads = [str(n) for n, row in enumerate(rows) if fmean(row) == fmean(first)]
        after_two = race([objective], ["0", "1"], range(5), {n: {s: row[s] for s in (0, 1)} for n, row in fits.items()})
        expected = leads if len(after_two.alive) == 1 or stats.t.sf(t, 2) < THRESHOLD else ["0", "1"]
        assert list(state.alive) == (after_two.alive if len(after_two.alive) == 1 else expected)
        left += len(state.alive) == 1
    assert 20 < left < 180


def test_two_equal_differences_say_nothing_and_one_without_values_leaves():
    assert survivors({"a": [(0.1,), (0.2,)], "b": [(0.3,), (0.4,)]}, 3) == ["a", "b"]
    assert survivors({"a": [(0.1,)] * 3, "b": [(0.3,)] * 3}, 4) == ["a"]
    assert survivors({"a": [(0.1,), None], "b": [None, None], "c": [None, (0.2,)]}, 3) == ["a", "c"]
    assert survivors({"a": [None, None], "b": [None, None]}, 3) == ["a", "b"]
    steady = [(0.1, 0.9), (0.11, 0.8), (0.1, 0.85), (0.12, 0.9)]
    assert survivors({"a": steady, "b": [(x + 1 + i / 99, y - 1) for i, (x, y) in enumerate(steady)]}, 9) == ["a", "b"]


def chosen(draws: np.random.Generator, seeds: int) -> tuple[float, float, int, bool]:
    """Returns the regrets of the naive best and of the race's choice among 50 trials, the trainings of the race, and
    whether a candidate that left would have ended ahead."""
    quality = draws.normal(0, 1, 50)
    searched = quality + draws.normal(0, 1, 50)
    top = [int(number) for number in np.argsort(searched)[:5]]
    hard = draws.normal(0, 3, seeds)
    whole = {str(n): {s: [quality[n] + hard[s] + draws.normal(0, 1)] for s in range(seeds)} for n in top}
    fits: dict[str, dict[int, list[float]]] = {label: {} for label in whole}
    while missing := (state := race([LOSS], list(whole), range(seeds), fits)).missing:
        for label, seed in missing:
            fits[label][seed] = whole[label][seed]
    means = {label: fmean(values[0] for values in rows.values()) for label, rows in whole.items()}
    best = min(state.alive, key=lambda label: means[label])
    trained = sum(map(len, fits.values()))
    least = quality.min()
    return quality[top[0]] - least, quality[int(best)] - least, trained, best != min(means, key=lambda n: means[n])


def test_the_choice_beats_the_luckiest_and_no_winner_leaves():
    """Oracle: the true qualities of a simulated table, whose noise is as large as the differences between trials."""
    draws = np.random.default_rng(1)
    naive, raced, trained, wrong = map(np.array, zip(*(chosen(draws, 8) for _ in range(400)), strict=True))
    gain = naive - raced
    assert gain.mean() > 3 * gain.std() / math.sqrt(len(gain)), "better beyond its error"
    assert raced.mean() < 0.75 * naive.mean()
    assert wrong.mean() < 0.05 and trained.mean() < 0.85 * 40
