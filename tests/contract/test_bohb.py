"""BOHB's model against its parts written down: which rung it is of, how much is drawn at random, Optuna's TPE on it."""

import math
import random
import statistics
from dataclasses import replace

import optuna
from optuna.trial import TrialState, create_trial
from proposed import as_proposed
from rounds import rounds

from hpo import Choice, Float, Objective
from hpo.search.samplers.base import TrialRecord, ask_seed
from hpo.search.samplers.optuna_sampler import distribution
from hpo.search.samplers.registry import make_sampler
from hpo.space.space import Space

SPACE = Space({"x": Float(0.0, 1.0), "lr": Float(1e-4, 1e-1, log=True), "kind": Choice(["a", "b"])})
ONE = [Objective("val/loss")]
TWO = [Objective("val/loss"), Objective("val/accuracy", "maximize")]
ENOUGH = len(SPACE) + 3  # the paper's N_min + 2 = (d + 1) + 2
SEED = 5
RUNGS = (1, 3, 9)


def drawn(number):
    """What a draw at random would be."""
    return as_proposed(SPACE, make_sampler("random", SPACE, ONE, SEED).ask(number).coordinates)


def told(number, epoch, state="paused", loss=None):
    """A trial anywhere that has come to an epoch, by a curve whose order turns round at every rung."""
    rng = random.Random(number)
    coordinates = {"x": rng.random(), "lr": 10 ** rng.uniform(-4, -1), "kind": rng.randrange(2)}
    level = rng.random() if loss is None else loss
    curve = [(e, level * (-1) ** sum(e >= rung for rung in RUNGS)) for e in range(1, epoch + 1)]
    values = (curve[-1][1],) if state == "complete" else None
    return TrialRecord(number, state, coordinates, values, curve)


def optunas(records, rung, number):
    """What Optuna's TPE proposes where trials are complete by their losses at the rung, without the others."""
    study = optuna.create_study()
    distributions = {path: distribution(seen) for path, seen in SPACE.coordinates.items()}
    for record in records:
        value = dict(record.curve).get(rung, math.nan)
        state, constraints = TrialState.COMPLETE if math.isfinite(value) else TrialState.FAIL, None
        if record.state == "running":
            state = TrialState.RUNNING
        elif record.state == "failed":
            state = TrialState.FAIL
        elif record.state == "infeasible":
            state, constraints = TrialState.PRUNED, {"feasible": 1.0}
        study.add_trial(
            create_trial(
                state=state,
                value=value if state == TrialState.COMPLETE else None,
                params=record.coordinates,
                distributions=distributions,
                intermediate_values=dict(record.curve) if constraints else {},
                constraints=constraints,
            )
        )
    study.sampler = optuna.samplers.TPESampler(seed=ask_seed(SEED, number) % 2**32, n_startup_trials=1)
    return as_proposed(SPACE, study.ask(distributions).params)


def guided(records, objectives=ONE):
    """The first proposal behind these trials that is not drawn at random, with its number and the trials before it;
    None where twelve in a row are."""
    sampler, records = make_sampler("bohb", SPACE, objectives, SEED), list(records)
    for record in records:
        sampler.tell(record)
    for number in range(len(records), len(records) + 12):
        if (asked := sampler.ask(number).coordinates) != drawn(number):
            return number, asked, records
        records.append(TrialRecord(number, "running", asked))
    return None


def assert_model_is_of(rung, records):
    found = guided(records)
    assert found is not None, "all are drawn at random"
    number, asked, before = found
    others = {one: optunas(before, one, number) for one in RUNGS}
    assert asked == others[rung], f"it is that of {[one for one, at in others.items() if at == asked]}"
    assert sum(asked == at for at in others.values()) == 1, "the rungs could not be told apart"


@rounds(
    ("first", "second", "third", "rung"),
    [
        (ENOUGH, 0, 0, 1),
        (12, ENOUGH - 1, 0, 1),
        (12, ENOUGH, 0, 3),
        (12, 12, ENOUGH - 1, 3),
        (12, 12, ENOUGH, 9),
    ],
)
def test_the_model_is_of_the_highest_rung_that_enough_trials_have_come_to(first, second, third, rung):
    """`first` trials have come to rung 1, so many of them to the second, so many of these to the third."""
    records = [told(n, 9 if n < third else 3 if n < second else 1) for n in range(first)]
    assert_model_is_of(rung, records)


def test_without_a_rung_that_tells_enough_everything_is_drawn_at_random():
    assert guided([told(n, 9) for n in range(ENOUGH - 1)]) is None
    broken = [replace(told(n, 1), curve=[(1, math.nan)]) for n in range(20)]
    assert guided(broken) is None, "a loss that is not finite tells nothing"


def test_at_its_rung_only_infeasible_and_failed_trials_rank_apart():
    states = ("paused", "pruned", "complete")
    records = [told(n, 3, states[n % 3]) for n in range(12)]
    records += [told(12, 1), replace(told(13, 3), curve=[(1, 0.1), (3, math.nan)])]
    assert_model_is_of(
        3, [*records, told(14, 3, "infeasible", loss=9.0), told(15, 3, "running"), told(16, 3, "failed", loss=-9.0)]
    )


def test_a_rung_that_tells_enough_later_takes_the_place_of_the_one_before():
    sampler, records = make_sampler("bohb", SPACE, ONE, SEED), [told(n, 1) for n in range(12)]
    for record in records:
        sampler.tell(record)
    seen = []
    for number in range(12, 30):
        asked = sampler.ask(number).coordinates
        rung = 1 if number < 18 else 3
        if asked != drawn(number):
            assert asked == optunas(records, rung, number), number
            seen.append(rung)
        records.append(TrialRecord(number, "running", asked))
        if number == 17:  # of the first twelve nothing is known there
            records[12:] = [replace(told(n, 3), coordinates=records[n].coordinates) for n in range(12, 18)]
            for record in records[12:]:
                sampler.tell(record)
    assert {1, 3} == set(seen)


def test_a_third_is_drawn_at_random_for_ever():
    sampler = make_sampler("bohb", SPACE, ONE, SEED)
    for n in range(12):
        sampler.tell(told(n, 3))
    at_random = []
    for number in range(12, 162):
        asked = sampler.ask(number).coordinates
        at_random.append(asked == drawn(number))
        sampler.tell(replace(told(number, 3), coordinates=asked))
    assert 35 <= sum(at_random) <= 65, "50 of 150 are expected, with a deviation of 6"
    assert 10 <= sum(at_random[75:]) <= 40


def test_with_several_objectives_the_model_is_of_complete_trials():
    def ended(number, state):
        return replace(told(number, 1), state=state, values=(random.Random(number).random(), 0.5), curve=())

    assert guided([ended(n, "complete") for n in range(ENOUGH - 1)], TWO) is None
    assert guided([ended(n, "failed") for n in range(12)], TWO) is None
    assert guided([ended(n, "complete") for n in range(ENOUGH)], TWO) is not None


def test_it_finds_more_than_a_search_at_random():
    """A bowl over three dimensions; each trial is known at epoch 1 and every third at epoch 3."""

    def found(name, seed):
        sampler, losses = make_sampler(name, SPACE, ONE, seed), []
        for number in range(60):
            at = sampler.ask(number).coordinates
            loss = (at["x"] - 0.3) ** 2 + (math.log10(at["lr"]) + 2.5) ** 2 / 9 + 0.1 * at["kind"]
            curve = [(e, loss + 0.2 / e) for e in range(1, 4 if number % 3 == 0 else 2)]
            sampler.tell(TrialRecord(number, "paused", at, None, curve))
            losses.append(loss)
        return statistics.median(losses[30:])

    pairs = [(found("bohb", seed), found("random", seed)) for seed in range(4)]
    assert all(ours < theirs for ours, theirs in pairs), pairs
    assert sum(ours for ours, _ in pairs) < 0.6 * sum(theirs for _, theirs in pairs), pairs
