"""The frontier alone, driven over random ends in random orders, with drivers that are replaced at any time."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_study import ENDS, LENGTH, SimulatedStudy, rules

from hpo.declaration.goal import Goal
from hpo.driver.failure_streak import MAX_EQUAL_FAILURES
from hpo.search.population.pbt import Pbt
from hpo.search.promotion.asha import AshaPromote
from hpo.space.trial_state import TERMINAL_STATES

RANDOM = st.integers(0, 2**32).map(Random)
WINDOW = st.integers(1, 5)
TRIALS = st.integers(1, 12)
# One trial at least is complete, since a study whose every trial is lost asks for ever.
MIXED = st.lists(st.sampled_from(ENDS), max_size=7).map(lambda ends: (*ends, "complete"))
LOSSES = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=11)
CRASHES = st.sampled_from([0.0, 0.5])


@given(RANDOM, WINDOW, TRIALS, MIXED, CRASHES)
def test_an_ordered_ask_knows_exactly_the_ends_before_its_window(rng, window, trials, ends, crashes):
    study = SimulatedStudy(rules(window=window, trials=trials), ends)
    study.drive(rng, crashes)
    assert study.asked == {number: tuple(range(number - window + 1)) for number in range(len(study.rows))}


@given(RANDOM, WINDOW, TRIALS, MIXED, LOSSES, st.data())
def test_neither_the_order_of_ends_nor_a_dead_driver_changes_a_study(rng, window, trials, ends, losses, data):
    bound: dict[str, Any] = data.draw(
        st.sampled_from([{}, {"epochs": 20}, {"goal": Goal(target=1.0)}, {"goal": Goal(patience=2)}])
    )
    one, other = (SimulatedStudy(rules(window=window, trials=trials, **bound), ends, losses) for _ in range(2))
    one.drive(Random(0))
    other.drive(rng, 0.5)
    assert other.rows == one.rows


@given(RANDOM, WINDOW, TRIALS, MIXED, CRASHES)
def test_an_asynchronous_ask_knows_all_that_has_ended(rng, window, trials, ends, crashes):
    study = SimulatedStudy(rules("async", window, trials=trials), ends)
    frontier = study.frontier()
    while not frontier.done:
        ended = {row["number"] for row in study.rows if row["state"] in TERMINAL_STATES}
        for ask in study.turn(frontier).ask:
            assert set(study.asked[ask.number]) == ended
        assert len(study.going()) <= window
        if rng.random() < crashes:
            frontier = study.frontier()
        elif study.going():
            study.train(rng.choice(study.going()))
    assert sorted(row["told"] for row in study.rows) == list(range(len(study.rows)))


@given(RANDOM, st.sampled_from(["ordered", "async"]), WINDOW, TRIALS, MIXED, CRASHES)
def test_trials_that_were_lost_are_replaced(rng, order, window, trials, ends, crashes):
    study = SimulatedStudy(rules(order, window, trials=trials), ends)
    study.drive(rng, crashes)
    assert sum(row["outcome"] != "lost" for row in study.rows) == trials
    assert all(row["state"] in TERMINAL_STATES and row["told"] is not None for row in study.rows)
    assert study.frontier().done and study.frontier().idle


@given(RANDOM, st.sampled_from(["ordered", "async"]), WINDOW, st.integers(1, 60), MIXED, CRASHES)
def test_a_budget_of_epochs_is_exceeded_by_less_than_a_trial(rng, order, window, epochs, ends, crashes):
    study = SimulatedStudy(rules(order, window, epochs=epochs), ends)
    study.drive(rng, crashes)
    assert epochs <= study.trained() < epochs + LENGTH


@given(RANDOM, WINDOW, MIXED, LOSSES, CRASHES, st.integers(0, 9))
def test_nothing_is_asked_for_once_the_target_is_reached(rng, window, ends, losses, crashes, target):
    study = SimulatedStudy(rules(window=window, trials=12, goal=Goal(target=float(target))), ends, losses)
    study.drive(rng, crashes)

    def reaches(number: int) -> bool:
        return study.rows[number]["state"] == "complete" and study.loss(number) <= target

    assert not any(reaches(number) for known in study.asked.values() for number in known)
    counted = sum(row["outcome"] != "lost" for row in study.rows)
    assert counted == 12 or any(map(reaches, range(len(study.rows))))


@given(RANDOM, WINDOW, LOSSES, CRASHES, st.integers(1, 4))
def test_nothing_is_asked_for_once_patience_is_over(rng, window, losses, crashes, patience):
    study = SimulatedStudy(rules(window=window, trials=12, goal=Goal(patience=patience)), losses=losses)
    study.drive(rng, crashes)

    def over(known: int) -> bool:
        """Whether so many trials in a row followed the first of the best, at any time."""
        best = [min(range(upto), key=study.loss) for upto in range(1, known + 1)]
        return any(upto - first >= patience for upto, first in enumerate(best))

    assert not any(over(len(known)) for known in study.asked.values())
    assert len(study.rows) == 12 or over(len(study.rows))


@given(RANDOM, WINDOW, TRIALS)
def test_time_that_is_used_up_begins_nothing_and_tells_what_has_ended(rng, window, trials):
    study = SimulatedStudy(rules("async", window, trials=trials, seconds=60.0))
    frontier = study.frontier()
    study.turn(frontier)
    study.train(rng.choice(study.going()))
    frontier.expired = True
    actions = study.turn(frontier)
    assert (actions.ask, actions.thaw) == ([], [])
    study.seconds = 60.0
    assert study.frontier().idle
    over = trials == 1
    assert (study.frontier().done, actions.done) == (over, over)
    assert len(actions.tell) == over, "as long as trials are left, an end waits for the ask that is to know it"


def promoting(window: int, **bound: Any):
    return rules("async", window, promotion=AshaPromote(min_epochs=1, eta=3), **bound)


@given(RANDOM, WINDOW, TRIALS, MIXED, LOSSES, CRASHES)
def test_promotion_trains_a_winner_in_full_and_gives_up_the_rest(rng, window, trials, ends, losses, crashes):
    study = SimulatedStudy(promoting(window, trials=trials), ends, losses)
    frontier = study.frontier()
    while not frontier.done:
        actions = study.turn(frontier)
        assert len(study.going()) <= window
        if rng.random() < crashes:
            frontier = study.frontier()
        elif not actions.retire and study.going():
            study.train(rng.choice(study.going()))
    assert all(row["state"] in TERMINAL_STATES for row in study.rows)
    trained = [row for row in study.rows if study.ends[row["number"] % len(ends)] == "complete"]
    assert any(row["epoch"] == LENGTH for row in trained) or {*ends} != {"complete"}
    assert all(row["state"] == ("complete" if row["epoch"] == LENGTH else "pruned") for row in trained)


@given(RANDOM, WINDOW, st.integers(1, 60), LOSSES, CRASHES)
def test_under_promotion_too_epochs_are_exceeded_by_less_than_a_trial(rng, window, epochs, losses, crashes):
    study = SimulatedStudy(promoting(window, epochs=epochs), losses=losses)
    study.drive(rng, crashes)
    assert epochs <= study.trained() < epochs + LENGTH
    assert any(row["state"] == "complete" for row in study.rows)


@given(RANDOM, st.integers(2, 4), st.integers(1, 4), MIXED, CRASHES)
def test_a_generation_begins_once_the_one_before_has_ended(rng, size, interval, ends, crashes):
    generations = -(-LENGTH // interval)
    pbt = Pbt(population=size, interval=interval)
    study = SimulatedStudy(rules(window=size, trials=size * generations, population=pbt), ends)
    study.drive(rng, crashes)
    counted = [row for row in study.rows if row["outcome"] != "lost"]
    assert len(counted) == size * generations
    for number, known in study.asked.items():
        assert known == tuple(range(number - number % size))
    assert not any(row["state"] == "paused" for row in study.rows)


@given(RANDOM, WINDOW, st.integers(0, 6), CRASHES)
def test_equal_failures_end_a_study_and_count_anew_on_resume(rng, window, good, crashes):
    study = SimulatedStudy(rules(window=window, trials=20), ("complete",) * good + ("failed",) * (20 - good))
    end = study._end

    def alike(row: dict[str, Any], how: str) -> None:
        end(row, how)
        row["error"] = row["error"] and "the same"

    study._end = alike  # type: ignore[method-assign]
    frontier = study.drive(rng, crashes)
    failed = [row["number"] for row in study.rows if row["state"] == "failed"]
    in_a_row = (range(number, number + MAX_EQUAL_FAILURES) for number in failed)
    assert frontier.streak.full and any({*row} <= {*failed} for row in in_a_row)
    assert len(study.rows) <= good + MAX_EQUAL_FAILURES - 1 + window
    study.stopped = True
    resumed = study.frontier()
    assert not resumed.done and not resumed.streak.full
    assert resumed.streak.forgiven == min(study.going(), default=len(study.rows))


@pytest.mark.parametrize("order", ["ordered", "async"])
def test_what_nobody_lets_go_on_is_stuck(order):
    study = SimulatedStudy(rules(order, 2, trials=2))
    frontier = study.frontier()
    study.turn(frontier)
    for row in study.rows:
        row["state"] = "paused"
    assert not study.turn(frontier).done
    assert frontier.only_paused and frontier.stuck


@given(RANDOM, st.sampled_from(["ordered", "async"]), WINDOW, st.integers(1, 6), st.integers(1, 6), MIXED)
def test_more_trials_go_on_from_what_has_ended(rng, order, window, first, more, ends):
    """In ordered mode the study is the one that was asked for at once."""
    study = SimulatedStudy(rules(order, window, trials=first), ends)
    study.drive(rng)
    before = [(row["state"], row["epoch"]) for row in study.rows]
    study.rules = rules(order, window, trials=first + more)
    study.drive(rng)
    assert [(row["state"], row["epoch"]) for row in study.rows][: len(before)] == before
    assert sum(row["outcome"] != "lost" for row in study.rows) == first + more
    if order == "ordered":
        assert study.asked == {number: tuple(range(number - window + 1)) for number in range(len(study.rows))}
