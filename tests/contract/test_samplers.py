"""What every sampler promises: proposals that a rebuild from the ledger's JSON repeats bit for bit."""

import json
import logging
import math
import random
import statistics
import time
from dataclasses import asdict

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState, create_trial
from scipy.stats.qmc import Sobol

from hpo import Bool, Choice, Float, Int, Objective
from hpo.errors import UserError
from hpo.search.sampler import TrialRecord, ask_seed
from hpo.search.samplers import SAMPLERS, make_sampler
from hpo.search.tpe import distribution
from hpo.space import Space

SPACE = Space(
    {
        "lr": Float(1e-4, 1e-1, log=True),
        "name": Choice(["sgd", "adamw", "lion"]),
        "momentum": Float(0.0, 0.9, step=0.1, when={"name": "sgd"}),
        "heads": Int(1, 8, powers_of_two=True),
        "hidden": Int(16, 128, multiple_of="heads"),
        "layers": Int(1, 6),
        "width": Int(8, 512, log=True),
        "gat": Bool(),
    }
)
ONE = [Objective("val/loss")]
TWO = [Objective("val/loss"), Objective("val/accuracy", "maximize")]
STATES = ("complete", "complete", "complete", "complete", "pruned", "pruned", "infeasible", "failed", "paused")


@pytest.fixture(params=SAMPLERS)
def name(request):
    return request.param


@pytest.fixture(params=[ONE, TWO], ids=["one objective", "two"])
def objectives(request):
    return request.param


def outcome(number, coordinates, objectives, states=STATES):
    """How a trial ends, a function of what it is."""
    rng = random.Random(number)
    loss = abs(math.log(coordinates["lr"]) + 5) + 0.1 * coordinates["layers"] + 0.01 * rng.random()
    curve = [(epoch, loss + 1 / epoch) for epoch in range(1, rng.randint(2, 6))]
    state = rng.choice(states)
    if state == "infeasible" and rng.random() < 0.5:
        curve[-1] = (curve[-1][0], math.nan)
    values = (loss, -loss)[: len(objectives)] if state == "complete" else None
    return TrialRecord(number, state, coordinates, values, curve)


def stored(record):
    """The record after a stay in the ledger."""
    data = json.loads(json.dumps(asdict(record)))
    values = data.pop("values")
    return TrialRecord(**data, values=None if values is None else tuple(values))


class Run:
    """A driver in miniature: what was asked and told, in the order it happened."""

    def __init__(self, name, objectives, seed=3, window=3):
        self.make = lambda: make_sampler(name, SPACE, objectives, seed)
        self.sampler, self.objectives, self.window = self.make(), objectives, window
        self.asked, self.told = [], []

    def ask(self):
        number = len(self.asked)
        self.asked.append(self.sampler.ask(number))

    def tell(self, number):
        record = outcome(number, self.asked[number].coordinates, self.objectives)
        self.told.append(record)
        self.sampler.tell(record)

    def rebuilt(self, rng):
        """A new sampler that learns everything at once, as after a restart, in any order."""
        sampler = self.make()
        told = {record.number: record for record in self.told}
        records = [
            told.get(number) or TrialRecord(number, "running", proposal.coordinates)
            for number, proposal in enumerate(self.asked)
        ]
        rng.shuffle(records)
        for record in records:
            (sampler.tell if record.number in told else sampler.adopt)(stored(record))
        return sampler

    def ordered(self, number):
        """Tell trial k exactly before ask k + W, then ask."""
        if number >= self.window:
            self.tell(number - self.window)
        self.ask()


def test_rebuild_at_any_ask_repeats_the_ordered_study(name, objectives):
    golden = Run(name, objectives)
    for number in range(34):
        golden.ordered(number)
    rng = random.Random(0)
    for cut in (0, 1, 3, 4, 11, 12, 17, 25, 33):
        run = Run(name, objectives)
        run.asked, run.told = golden.asked[:cut], golden.told[: max(cut - run.window, 0)]
        run.sampler = run.rebuilt(rng)
        for number in range(cut, 34):
            run.ordered(number)
            if number % 7 == 0:
                run.sampler = run.rebuilt(rng)
        assert run.asked == golden.asked, f"after a restart before ask {cut}"


def test_rebuild_repeats_the_next_ask_in_whatever_order_trials_ended(name):
    rng = random.Random(1)
    run = Run(name, ONE)
    for number in range(30):
        run.ask()
        for other in [k for k in range(number + 1) if k not in {r.number for r in run.told}]:
            if rng.random() < 0.3:
                run.tell(other)
        assert run.rebuilt(rng).ask(number + 1) == run.rebuilt(rng).ask(number + 1)
    assert run.rebuilt(rng).ask(30) == run.sampler.ask(30)


def test_order_of_tells_between_two_asks_does_not_matter(name):
    def next_ask(order):
        run = Run(name, ONE)
        for _ in range(16):
            run.ask()
        for number in order:
            run.tell(number)
        return run.sampler.ask(16)

    numbers = list(range(14))
    expected = next_ask(numbers)
    for seed in range(4):
        random.Random(seed).shuffle(numbers)
        assert next_ask(numbers) == expected


def test_paused_trial_that_is_thawed_counts_by_its_end(name):
    run, never_paused = Run(name, ONE), Run(name, ONE)
    for _ in range(14):
        run.ask()
        never_paused.ask()
    for number in range(13):
        end = outcome(number, run.asked[number].coordinates, ONE, ("complete",))
        run.sampler.tell(TrialRecord(number, "paused", end.coordinates, None, end.curve[:1]))
        run.sampler.tell(end)
        never_paused.sampler.tell(end)
    assert run.sampler.ask(14) == never_paused.sampler.ask(14)
    run.sampler.tell(TrialRecord(13, "paused", run.asked[13].coordinates, None, [(1, 0.5)]))
    run.sampler.ask(15)
    run.sampler.adopt(TrialRecord(13, "running", run.asked[13].coordinates))
    never_paused.sampler.ask(15)
    assert run.sampler.ask(16) == never_paused.sampler.ask(16), "running again as if it had never waited"


def test_proposals_are_plain_json_within_the_space(name):
    run = Run(name, ONE)
    for number in range(24):
        run.ordered(number)
        proposal = run.asked[-1]
        assert json.loads(json.dumps(asdict(proposal))) == asdict(proposal)
        assert all(type(value) in (int, float) for value in proposal.coordinates.values())
        assert tuple(proposal.coordinates) == SPACE.paths
        params = SPACE.decode(proposal.coordinates)
        assert params["hidden"] % params["heads"] == 0 and 1e-4 <= params["lr"] <= 1e-1
        assert 0 <= proposal.seed < 2**63 and proposal.draw == 0


def test_seed_and_number_decide(name):
    def first(seed, count=12):
        sampler = make_sampler(name, SPACE, ONE, seed)
        return [sampler.ask(number) for number in range(count)]

    assert first(0) == first(0)
    if name != "grid":
        assert first(0) != first(1)
        assert len({json.dumps(proposal.coordinates) for proposal in first(0)}) == 12


def test_one_dimension_and_none(name):
    for space in (Space({}), Space({"x": Choice([1])})):
        sampler = make_sampler(name, space, ONE, 0)
        assert set(sampler.ask(0).coordinates) == set(space.paths)
        assert sampler.exhausted(1) == (name == "grid")


def test_optuna_keeps_the_verbosity_its_user_chose_and_says_nothing(name, caplog):
    optuna.logging.enable_propagation()
    try:
        for level in (optuna.logging.INFO, optuna.logging.ERROR):
            optuna.logging.set_verbosity(level)
            with caplog.at_level(logging.DEBUG):
                run = Run(name, ONE)
                for number in range(14):
                    run.ordered(number)
            assert not caplog.records
            assert optuna.logging.get_verbosity() == level
    finally:
        optuna.logging.set_verbosity(optuna.logging.INFO)
        optuna.logging.disable_propagation()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("tpf", {}, ["unknown sampler 'tpf'", "did you mean 'tpe'"]),
        ("tpe", {"n_startup_trial": 3}, ["no option 'n_startup_trial'", "did you mean 'n_startup_trials'"]),
        ("grid", {"points": 0}, ["points=0", "whole number from 1"]),
        ("random", {"points": 3}, ["it has none"]),
    ],
)
def test_unknown_samplers_and_options_are_refused_in_one_sentence(name, options, words):
    with pytest.raises(UserError) as caught:
        make_sampler({"name": name} | options, SPACE, ONE, 0)
    assert all(word in str(caught.value) for word in words)


# --- Each against an oracle


def test_random_is_uniform_in_the_cube():
    sampler = make_sampler("random", Space({"u": Float(0.0, 1.0), "c": Choice([1, 2, 3, 4])}), ONE, 0)
    drawn = [sampler.ask(number).coordinates for number in range(4000)]
    u = np.sort([d["u"] for d in drawn])
    assert np.abs(u - (np.arange(4000) + 0.5) / 4000).max() < 1.63 / math.sqrt(4000), "Kolmogorov-Smirnov, 1 %"
    counts = np.bincount([d["c"] for d in drawn], minlength=4)
    assert ((counts - 1000) ** 2 / 1000).sum() < 11.3, "chi-squared, 3 degrees, 1 %"


def test_qmc_is_one_scrambled_sobol_sequence_in_any_order():
    space = Space({"a": Float(0.0, 1.0), "b": Float(0.0, 1.0)})
    expected = Sobol(2, scramble=True, rng=ask_seed(5, -1)).random(64)
    sampler = make_sampler("qmc", space, ONE, 5)
    for number in (0, 1, 2, 7, 8, 3, 63, 40):
        assert list(sampler.ask(number).coordinates.values()) == expected[number].tolist()
    cells = {tuple((point * 8).astype(int)) for point in expected}
    assert len(cells) == 64, "a (0, 2)-sequence: each of 8 x 8 cells once"


def test_grid_is_the_grid_of_the_space_and_then_exhausted():
    sampler = make_sampler({"name": "grid", "points": 2}, SPACE, ONE, 0)
    size = SPACE.grid_size(2)
    assert not sampler.exhausted(size - 1) and sampler.exhausted(size)
    assert sampler.ask(size - 1).coordinates == SPACE.grid(size - 1, 2)


@pytest.mark.parametrize("objectives", [ONE, TWO], ids=["one objective", "two"])
def test_tpe_is_optunas_on_the_trials_as_documented(objectives):
    """Another way to the same study: finished trials added whole, the running ones by their parameters."""
    run = Run("tpe", objectives)
    for _ in range(40):
        run.ask()
    for number in range(36):
        run.tell(number)
    study = optuna.create_study(directions=[objective.direction for objective in objectives])
    distributions = {path: distribution(seen) for path, seen in SPACE.coordinates.items()}
    told = {record.number: record for record in run.told}
    for number, proposal in enumerate(run.asked):
        record = told.get(number)
        state = record.state if record else "running"
        curve = dict(record.curve) if record and len(objectives) == 1 and state != "failed" else {}
        study.add_trial(
            create_trial(
                state={"complete": TrialState.COMPLETE, "running": TrialState.RUNNING, "failed": TrialState.FAIL}.get(
                    state, TrialState.PRUNED
                ),
                values=record.values if record else None,
                params=proposal.coordinates,
                distributions=distributions,
                intermediate_values=curve,
                constraints={"any": 7.0} if state == "infeasible" else None,
            )
        )
    study.sampler = optuna.samplers.TPESampler(seed=ask_seed(3, 40) % 2**32)
    assert study.ask(distributions).params == run.sampler.ask(40).coordinates
    assert {record.state for record in run.told} == set(STATES)


def test_tpe_learns_what_is_good_and_what_is_infeasible():
    space = Space({"x": Float(0.0, 1.0), "y": Float(0.0, 1.0)})
    sampler = make_sampler("tpe", space, ONE, 0)
    drawn = []
    for number in range(60):
        drawn.append(at := sampler.ask(number).coordinates)
        if at["x"] > 0.5:  # the best values, were they allowed
            sampler.tell(TrialRecord(number, "infeasible", at, None, [(1, -100.0)]))
        else:
            sampler.tell(TrialRecord(number, "complete", at, ((at["x"] - 0.3) ** 2 + (at["y"] - 0.7) ** 2,), ()))
    late = drawn[30:]
    assert sum(at["x"] > 0.5 for at in late) <= 7, "half of them at random"
    assert statistics.median(math.dist((at["x"], at["y"]), (0.3, 0.7)) for at in late) < 0.25, "0.45 at random"


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_complete_trial_without_a_finite_value_is_never_scored(value):
    good, bad = Run("tpe", ONE), Run("tpe", ONE)
    for run, state in ((good, "infeasible"), (bad, "complete")):
        for _ in range(12):
            run.ask()
        for number in range(12):
            run.sampler.tell(TrialRecord(number, state, run.asked[number].coordinates, (value,), ()))
    assert good.sampler.ask(12) == bad.sampler.ask(12)


def test_random_asks_cost_far_less_than_a_millisecond():
    sampler = make_sampler("random", SPACE, ONE, 0)
    times = []
    for number in range(300):
        start = time.perf_counter()
        sampler.ask(number)
        times.append(time.perf_counter() - start)
    assert statistics.median(times) < 0.001
