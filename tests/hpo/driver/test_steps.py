"""Ordered pausing by the frontier alone: random results in random orders, with drivers that are replaced at any time,
against the sequence of steps as it is defined."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from simulated_study import ENDS, LENGTH, RUNGS, SimulatedStudy, rules

from hpo.declaration.goal import Goal
from hpo.driver.steps import sequence
from hpo.search.promotion.asha import AshaPromote
from hpo.search.promotion.base import RungView
from hpo.space.trial_state import OPEN_STATES, TERMINAL_STATES

RANDOM = st.integers(0, 2**32).map(Random)
WINDOW = st.integers(1, 5)
TRIALS = st.integers(1, 15)
ETA = st.sampled_from([2, 3])
MIXED = st.lists(st.sampled_from(ENDS), max_size=5).map(lambda ends: (*ends, "complete", "complete"))
LOSSES = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=11)
CRASHES = st.sampled_from([0.0, 0.5])


def study_of(window: int, eta: int, ends: Any = ("complete",), losses: Any = (1.0,), **bound: Any) -> SimulatedStudy:
    promotion = AshaPromote(min_epochs=1, eta=eta)
    return SimulatedStudy(rules("ordered", window, promotion=promotion, **bound), ends, losses)


def steps_of(study: SimulatedStudy) -> list[int]:
    return sequence({row["number"]: row for row in study.rows}, study.thaws)  # type: ignore[arg-type]


def results_of(study: SimulatedStudy) -> Any:
    return study.rows, study.thaws, study.pauses, study.asked


def defined(study: SimulatedStudy, trials: int) -> list[int]:
    """The steps of a study by their definition, one after another, from its tables alone. Nothing is lost in it."""
    promotion, window = study.rules.promotion, study.rules.window
    assert promotion is not None
    steps, boards = list[int](), [(dict[int, list[tuple[int, float]]](), dict[int, str]())]
    while True:
        known = boards[max(0, len(steps) - window + 1)]
        numbers = {*steps}
        begun = [steps.count(number) for number in range(len(numbers))]
        segments = [steps[: max(0, len(steps) - window + 1)].count(number) for number in range(len(numbers))]
        states = {n: known[1][n] if segments[n] == begun[n] else "running" for n in sorted(numbers)}
        promoted = promotion.promote(RungView({n: known[0].get(n, []) for n in sorted(numbers)}, states), False)
        if not promoted and len(numbers) == trials:
            return steps
        number = promoted[0] if promoted else len(numbers)
        steps.append(number)
        curves, ended = dict(boards[-1][0]), dict(boards[-1][1])
        end, before = study.ends[number % len(study.ends)], curves.get(number, [])
        last = before[-1][0] if before else 0
        until = next((rung for rung in RUNGS if rung > last), LENGTH)
        until = until if end == "complete" else min(until, max(last, 1))
        curves[number] = [*before, (until, study.loss(number + until))]
        ended[number] = end if end != "complete" or until == LENGTH else "paused"
        boards.append((curves, ended))


@given(RANDOM, WINDOW, TRIALS, ETA, LOSSES, CRASHES, st.integers(1, 5), st.data())
def test_each_step_is_decided_from_the_results_before_its_window(rng, window, trials, eta, losses, crashes, workers, d):
    ends = d.draw(st.lists(st.sampled_from(["complete", "infeasible"]), max_size=4).map(lambda e: (*e, "complete")))
    study = study_of(window, eta, ends, losses, trials=trials)
    study.drive(rng, crashes, workers)
    assert steps_of(study) == defined(study, trials)


@given(RANDOM, WINDOW, TRIALS, ETA, MIXED, LOSSES, st.integers(1, 5), st.data())
def test_neither_workers_nor_a_dead_driver_change_the_steps(rng, window, trials, eta, ends, losses, workers, data):
    bound = data.draw(st.sampled_from([{}, {"epochs": 30}, {"goal": Goal(target=1.0)}, {"goal": Goal(patience=2)}]))
    alone, several = (study_of(window, eta, ends, losses, trials=trials, **bound) for _ in range(2))
    alone.drive(Random(0), workers=1)
    several.drive(rng, 0.5, workers)
    assert results_of(several) == results_of(alone)


@given(RANDOM, WINDOW, TRIALS, st.integers(1, 9), ETA, MIXED, LOSSES, CRASHES)
def test_in_parts_it_is_the_study_at_once(rng, window, first, more, eta, ends, losses, crashes):
    parts, whole = (study_of(window, eta, ends, losses, trials=first + more) for _ in range(2))
    parts.rules = study_of(window, eta, trials=first).rules
    parts.drive(rng, crashes)
    before = steps_of(parts)
    parts.rules = whole.rules
    parts.drive(rng, crashes)
    whole.drive(Random(0))
    assert results_of(parts) == results_of(whole)
    assert steps_of(whole)[: len(before)] == before


@given(RANDOM, WINDOW, st.integers(1, 60), st.integers(1, 60), ETA, LOSSES, CRASHES)
def test_epochs_in_parts_are_exceeded_by_less_than_a_trial(rng, window, first, more, eta, losses, crashes):
    parts, whole = (study_of(window, eta, losses=losses, epochs=first + more) for _ in range(2))
    parts.rules = study_of(window, eta, epochs=first).rules
    parts.drive(rng, crashes)
    assert first <= parts.trained() < first + LENGTH
    parts.rules = whole.rules
    parts.drive(rng, crashes)
    whole.drive(Random(0))
    assert results_of(parts) == results_of(whole)
    assert first + more <= whole.trained() < first + more + LENGTH


@given(RANDOM, WINDOW, TRIALS, ETA, MIXED, LOSSES, CRASHES)
def test_what_waits_at_the_end_goes_on_waiting(rng, window, trials, eta, ends, losses, crashes):
    study = study_of(window, eta, ends, losses, trials=trials)
    frontier = study.drive(rng, crashes)
    states = {row["state"] for row in study.rows}
    assert states <= {*TERMINAL_STATES, "paused"}
    assert all((row["told"] is None) == (row["state"] == "paused") for row in study.rows)
    told = [row["told"] for row in study.rows if row["told"] is not None]
    assert sorted(told) == list(range(len(told)))
    assert sum(row["outcome"] != "lost" for row in study.rows) == trials
    assert study.frontier().done and study.frontier().idle and not frontier.next(ask=False).tell


@given(RANDOM, WINDOW, TRIALS, ETA, LOSSES)
def test_time_that_is_used_up_begins_nothing(rng, window, trials, eta, losses):
    study, whole = (study_of(window, eta, losses=losses, trials=trials, seconds=60.0) for _ in range(2))
    frontier = study.frontier()
    study.turn(frontier)
    study.train(rng.choice(study.going()))
    frontier.expired = True
    actions = study.turn(frontier)
    assert not (actions.ask or actions.onward)
    study.drive(rng)
    whole.drive(Random(0))
    assert results_of(study) == results_of(whole)


@given(RANDOM, WINDOW, st.integers(0, 9), ETA, LOSSES, CRASHES)
def test_equal_failures_keep_what_waits_and_a_resume_goes_on(rng, window, good, eta, losses, crashes):
    study = study_of(window, eta, ("complete",) * good + ("failed",) * (20 - good), losses, trials=20)
    end = study._end

    def alike(row: dict[str, Any], how: str) -> None:
        end(row, how)
        row["error"] = row["error"] and "the same"

    study._end = alike  # type: ignore[method-assign]
    frontier = study.drive(rng, crashes)
    study.turn(frontier)  # as a driver does once its workers have left
    assert frontier.streak.full
    assert all((row["told"] is None) == (row["state"] in OPEN_STATES) for row in study.rows)
    study.stopped, study.ends = True, ("complete",)
    frontier = study.frontier()
    assert not frontier.done and not frontier.streak.full
    study.forgiven, study.stopped = frontier.streak.forgiven, False
    study.drive(rng, crashes)
    told = [row["told"] for row in study.rows if row["told"] is not None]
    assert len(study.rows) == 20 and sorted(told) == list(range(len(told)))
    assert {row["state"] for row in study.rows} <= {"complete", "paused", "failed"}
