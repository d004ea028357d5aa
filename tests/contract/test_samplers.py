"""What every sampler promises: proposals that a rebuild from the ledger's JSON repeats bit for bit."""

import json
import logging
import math
import random
import statistics
import sys
import warnings
from collections import Counter
from dataclasses import asdict, replace

import cmaes
import numpy as np
import optuna
import pytest
from optuna.trial import TrialState, create_trial
from proposed import as_proposed
from scipy.stats.qmc import Sobol

from hpo import Bool, Choice, Float, Int, Objective
from hpo.errors import UserError
from hpo.search.samplers import auto, optuna_sampler
from hpo.search.samplers.base import TrialRecord, ask_seed
from hpo.search.samplers.deduplicate import DeduplicatingSampler, is_alike
from hpo.search.samplers.optuna_sampler import distribution, quiet_study
from hpo.search.samplers.registry import SAMPLERS, WARM, make_sampler
from hpo.space.space import Space

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


# Small enough for every one of them to be past its start in a few trials.
SPECS = {name: {"name": name} for name in SAMPLERS} | {
    "gp": {"name": "gp", "n_startup_trials": 4},
    "nsga2": {"name": "nsga2", "population_size": 4},
    "nsga3": {"name": "nsga3", "population_size": 4},
}


@pytest.fixture(autouse=True)
def quick_acquisition(monkeypatch):
    """Have Gaussian processes search their acquisition function from few points, which takes nearly all of their time.

    Every sampler compared with one has the same effort, the oracle's too.
    """
    init = optuna.samplers.GPSampler.__init__

    def quick(self, *given, **options):
        init(self, *given, **options)
        assert (self._n_preliminary_samples, self._n_local_search) == (2048, 10)
        self._n_preliminary_samples, self._n_local_search = 64, 2

    monkeypatch.setattr(optuna.samplers.GPSampler, "__init__", quick)


@pytest.fixture(params=SAMPLERS)
def name(request):
    return request.param


@pytest.fixture
def spec(name):
    return SPECS[name]


@pytest.fixture
def length(name):
    """How many trials tell what a sampler does: of a Gaussian process as few as may be."""
    return 9 if name == "gp" else 27


def record_of(number, proposal, state="running", values=None, curve=()):
    """A trial of the ledger, with what it keeps of the ask."""
    return TrialRecord(number, state, proposal.coordinates, values, curve, proposal.trial_attrs, proposal.study_attrs)


def outcome(number, proposal, objectives, states=STATES):
    """How a trial ends, a function of what it is."""
    rng, coordinates = random.Random(number), proposal.coordinates
    loss = abs(math.log(coordinates["lr"]) + 5) + 0.1 * coordinates["layers"] + 0.01 * rng.random()
    curve = [(epoch, loss + 1 / epoch) for epoch in range(1, rng.randint(2, 6))]
    state = rng.choice(states)
    if state == "infeasible" and rng.random() < 0.5:
        curve[-1] = (curve[-1][0], math.nan)
    values = (loss, -loss)[: len(objectives)] if state == "complete" else None
    return record_of(number, proposal, state, values, curve)


def stored(record):
    """The record after a stay in the ledger."""
    data = json.loads(json.dumps(asdict(record)))
    values = data.pop("values")
    return TrialRecord(**data, values=None if values is None else tuple(values))


class Run:
    """A driver in miniature: what was asked and told, in the order it happened."""

    def __init__(self, spec, objectives, seed=3, window=3, space=SPACE, end=None):
        self.make = lambda: make_sampler(spec, space, objectives, seed)
        self.end = end or (lambda number, proposal: outcome(number, proposal, objectives))
        self.sampler, self.objectives, self.window = self.make(), objectives, window
        self.asked, self.told = [], []

    def ask(self):
        number = len(self.asked)
        self.asked.append(self.sampler.ask(number))

    def tell(self, number):
        record = self.end(number, self.asked[number])
        self.told.append(record)
        self.sampler.tell(record)

    def rebuilt(self, rng):
        """A new sampler that learns everything at once, as after a restart, in any order."""
        sampler = self.make()
        told = {record.number: record for record in self.told}
        records = [told.get(number) or record_of(number, proposal) for number, proposal in enumerate(self.asked)]
        rng.shuffle(records)
        for record in records:
            (sampler.tell if record.number in told else sampler.adopt)(stored(record))
        return sampler

    def ordered(self, number):
        """Tell trial k exactly before ask k + W, then ask."""
        if number >= self.window:
            self.tell(number - self.window)
        self.ask()


ALONE = {"cmaes": "sampler 'cmaes' takes one .* choose nsga2", "freeze-thaw": "'freeze-thaw' takes one .* choose tpe"}


def refused(name, objectives):
    return name in ALONE and len(objectives) > 1


def test_rebuild_at_any_ask_repeats_the_ordered_study(name, spec, length):
    for objectives in (ONE, TWO):
        if refused(name, objectives):
            with pytest.raises(UserError, match=ALONE[name]):
                make_sampler(spec, SPACE, objectives, 0)
        else:
            assert_repeated(name, spec, objectives, length)


RULED = Space(
    {
        "lr": Float(1e-4, 1e-1, log=True),
        "low": Float(0.0, 1.0),
        "high": Float(0.0, 1.0),
        "share": Float(0.0, 1.0),
        "layers": Int(1, 6),
        "heads": Int(1, 8),
        "dim": Int(8, 64),
        "kind": Choice(["a", "b"]),
    },
    rules=["low < high", "share + low <= 0.9", "dim % heads == 0"],
)


def refused_at_times(number, proposal):
    """How a trial ends where the configuration refuses every fifth: nothing is known of that one."""
    record = outcome(number, proposal, ONE)
    return replace(record, state="infeasible", values=None, curve=()) if number % 5 == 2 else record


def test_rules_hold_at_every_ask_and_a_rebuild_repeats_it(name, spec, length):
    golden = assert_repeated(name, spec, ONE, length, space=RULED, end=refused_at_times)
    for proposal in golden.asked:
        params = RULED.decode(proposal.coordinates)
        assert params["low"] < params["high"] and params["share"] + params["low"] <= 0.9
        assert params["dim"] % params["heads"] == 0 and RULED.decode(RULED.encode(params, {})) == params
    assert any(proposal.draw for proposal in golden.asked) or name == "grid", "some were drawn anew"


def test_what_is_enqueued_keeps_what_it_says_under_rules(name, spec):
    queue = [{"dim": 60, "low": 0.25}]
    sampler = make_sampler(spec, RULED, ONE, 0, queue)
    params = RULED.decode(sampler.ask(0).coordinates)
    assert (params["dim"], params["low"]) == (60, 0.25) and 60 % params["heads"] == 0 and params["high"] > 0.25


def assert_repeated(name, spec, objectives, length, **of):
    golden = Run(spec, objectives, **of)
    for number in range(length):
        golden.ordered(number)
    rng = random.Random(0)
    for cut in [cut for cut in (0, 3, 4, 8, 11, 12, 17, 25) if cut < length]:
        run = Run(spec, objectives, **of)
        run.asked, run.told = golden.asked[:cut], golden.told[: max(cut - run.window, 0)]
        run.sampler = run.rebuilt(rng)
        for number in range(cut, min(cut + (2 if name == "gp" else 8), length)):
            run.ordered(number)
            if number % 7 == 0:
                run.sampler = run.rebuilt(rng)
        where = f"{len(objectives)} objectives, after a restart before ask {cut}"
        assert run.asked == golden.asked[: len(run.asked)], where
    return golden


def test_rebuild_repeats_the_next_ask_in_whatever_order_trials_ended(name, spec, length):
    rng = random.Random(1)
    run = Run(spec, ONE)
    for number in range(length - 3):
        run.ask()
        for other in [k for k in range(number + 1) if k not in {r.number for r in run.told}]:
            if rng.random() < 0.3:
                run.tell(other)
        if name != "gp" and number % 3 == 0:
            assert run.rebuilt(rng).ask(number + 1) == run.rebuilt(rng).ask(number + 1)
    assert run.rebuilt(rng).ask(length - 3) == run.sampler.ask(length - 3)


def test_order_of_tells_between_two_asks_does_not_matter(name, spec):
    def next_ask(order):
        run = Run(spec, ONE)
        for _ in range(16):
            run.ask()
        for number in order:
            run.tell(number)
        return run.sampler.ask(16)

    numbers = list(range(14))
    expected = next_ask(numbers)
    for seed in range(1 if name == "gp" else 4):
        random.Random(seed).shuffle(numbers)
        assert next_ask(numbers) == expected


def test_paused_trial_that_is_thawed_counts_by_its_end(spec):
    run, never_paused = Run(spec, ONE), Run(spec, ONE)
    for _ in range(14):
        run.ask()
        never_paused.ask()
    for number in range(13):
        end = outcome(number, run.asked[number], ONE, ("complete",))
        run.sampler.tell(record_of(number, run.asked[number], "paused", None, end.curve[:1]))
        run.sampler.tell(end)
        never_paused.sampler.tell(end)
    assert run.sampler.ask(14) == never_paused.sampler.ask(14)
    run.sampler.tell(record_of(13, run.asked[13], "paused", None, [(1, 0.5)]))
    between = record_of(15, run.sampler.ask(15))
    run.sampler.adopt(record_of(13, run.asked[13]))
    never_paused.sampler.adopt(between)
    assert run.sampler.ask(16) == never_paused.sampler.ask(16), "running again as if it had never waited"


def test_proposals_are_plain_json_within_the_space(spec, length):
    run = Run(spec, ONE)
    for number in range(length):
        run.ordered(number)
        proposal = run.asked[-1]
        assert json.loads(json.dumps(asdict(proposal))) == asdict(proposal)
        assert all(type(value) in (int, float) for value in proposal.coordinates.values())
        assert tuple(proposal.coordinates) == SPACE.paths
        assert all(SPACE.dimensions[path].holds(at) for path, at in proposal.coordinates.items())
        params = SPACE.decode(proposal.coordinates)
        assert params["hidden"] % params["heads"] == 0 and 1e-4 <= params["lr"] <= 1e-1
        assert 0 <= proposal.seed < 2**63 and proposal.draw == 0


def test_seed_and_number_decide(name, spec):
    def first(seed, count=12):
        sampler = make_sampler(spec, SPACE, ONE, seed)
        return [sampler.ask(number) for number in range(count)]

    assert first(0) == first(0)
    if name != "grid":
        assert first(0) != first(1)
        assert len({json.dumps(proposal.coordinates) for proposal in first(0)}) == 12


def test_one_dimension_and_none(name, spec):
    for space in (Space({}), Space({"x": Choice([1])}), Space({"x": Int(3, 3)}), Space({"x": Float(0.0, 1.0)})):
        sampler = make_sampler(spec, space, ONE, 0)
        for number in range(9):
            if not sampler.exhausted(number):
                proposal = sampler.ask(number)
                assert set(proposal.coordinates) == set(space.paths)
                sampler.tell(record_of(number, proposal, "complete", (float(number),)))
        assert bool(sampler.exhausted(5)) == (name == "grid")


def test_optuna_keeps_the_verbosity_its_user_chose_and_says_nothing(spec, length, caplog):
    optuna.logging.enable_propagation()
    try:
        for level in (optuna.logging.INFO, optuna.logging.ERROR):
            optuna.logging.set_verbosity(level)
            with caplog.at_level(logging.DEBUG):
                run = Run(spec, ONE)
                for number in range(14 if length > 14 else 8):
                    run.ordered(number)
            assert not caplog.records
            assert optuna.logging.get_verbosity() == level
    finally:
        optuna.logging.set_verbosity(optuna.logging.INFO)
        optuna.logging.disable_propagation()


def test_unknown_samplers_and_options_are_refused_in_one_sentence():
    for name, options, words in [
        ("tpf", {}, ["unknown sampler 'tpf'", "did you mean 'tpe'"]),
        ("tpe", {"n_startup_trial": 3}, ["no option 'n_startup_trial'", "did you mean 'n_startup_trials'"]),
        ("grid", {"points": 0}, ["points=0", "whole number from 1"]),
        ("random", {"points": 3}, ["it has none"]),
        ("nsga2", {"population_size": 1}, ["population_size=1", "whole number from 2"]),
    ]:
        with pytest.raises(UserError) as caught:
            make_sampler({"name": name} | options, SPACE, ONE, 0)
        assert all(word in str(caught.value) for word in words), str(caught.value)


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
    size = SPACE.grid(2).size
    assert not sampler.exhausted(size - 1) and sampler.exhausted(size)
    assert sampler.ask(size - 1).coordinates == SPACE.grid(2).point(size - 1)


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
    assert as_proposed(SPACE, study.ask(distributions).params) == run.sampler.ask(40).coordinates
    assert {record.state for record in run.told} == set(STATES)


@pytest.mark.parametrize(
    ("name", "count", "objectives"),
    [("gp", 7, ONE), *((name, 20, objectives) for name in ("nsga2", "nsga3") for objectives in (ONE, TWO))],
)
def test_the_other_models_are_optunas_own(name, count, objectives):
    """Trials one after another, all complete: Optuna's study goes on as it is, with a fresh sampler for each ask.

    Version 1 does not round, and neither does Optuna."""
    sampler, options = (
        make_sampler(SPECS[name], SPACE, objectives, 3, versions={f"sampler {name}": 1}),
        {k: v for k, v in SPECS[name].items() if k != "name"},
    )
    kind = {"gp": "GPSampler", "nsga2": "NSGAIISampler", "nsga3": "NSGAIIISampler"}[name]
    study = optuna.create_study(directions=[objective.direction for objective in objectives])
    distributions = {path: distribution(seen) for path, seen in SPACE.coordinates.items()}
    for number in range(count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.sampler = getattr(optuna.samplers, kind)(seed=ask_seed(3, number) % 2**32, **options)
        trial, proposal = study.ask(distributions), sampler.ask(number)
        assert trial.params == proposal.coordinates
        record = outcome(number, proposal, objectives, ("complete",))
        study.tell(trial, list(record.values))
        sampler.tell(record)


@pytest.mark.parametrize(
    ("name", "count", "objectives"), [("gp", 7, ONE), ("tpe", 16, ONE), ("tpe", 16, TWO), ("nsga2", 16, TWO)]
)
def test_constraints_enter_the_models_as_optunas_own(name, count, objectives):
    """Trials with a violation each, told by their values whether they keep to the bound or not."""
    sampler = make_sampler(SPECS[name], SPACE, objectives, 3, versions={f"sampler {name}": 1})
    kind = {"gp": "GPSampler", "tpe": "TPESampler", "nsga2": "NSGAIISampler"}[name]
    options = {k: v for k, v in SPECS[name].items() if k != "name"}
    study = optuna.create_study(directions=[objective.direction for objective in objectives])
    distributions = {path: distribution(seen) for path, seen in SPACE.coordinates.items()}
    broken = 0
    for number in range(count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.sampler = getattr(optuna.samplers, kind)(seed=ask_seed(3, number) % 2**32, **options)
        trial, proposal = study.ask(distributions), sampler.ask(number)
        assert trial.params == proposal.coordinates
        values = outcome(number, proposal, objectives, ("complete",)).values
        violation = (proposal.coordinates["layers"] - 4) / 4
        broken += violation > 0
        trial.set_constraint("0", violation)
        study.tell(trial, list(values))
        state = "infeasible" if violation > 0 else "complete"
        sampler.tell(replace(record_of(number, proposal, state, values), violations=(violation,)))
    assert 0 < broken < count


@pytest.mark.parametrize("name", ["tpe", "nsga2", "nsga3"])
def test_with_several_objectives_a_stopped_trial_counts_by_its_values(name):
    seen, meant = make_sampler(SPECS[name], SPACE, TWO, 0), make_sampler(SPECS[name], SPACE, TWO, 0)
    for number in range(12):
        proposal = seen.ask(number)
        assert meant.ask(number) == proposal
        values = outcome(number, proposal, TWO, ("complete",)).values
        state = ("complete", "pruned", "paused")[number % 3]
        seen.tell(record_of(number, proposal, state, values))
        meant.tell(record_of(number, proposal, "complete", values))
    assert seen.ask(12) == meant.ask(12)


def test_a_gaussian_process_sees_stopped_trials_and_avoids_infeasible():
    """As if the stopped trial had ended with its last value, and the infeasible ones as badly as the worst."""
    ends = [
        ("complete", (3.0,), ()),
        ("pruned", None, [(1, 5.0), (2, 4.5)]),
        ("pruned", None, [(1, 0.5), (2, math.nan)]),
        ("infeasible", None, [(1, -9.0)]),
        ("failed", None, [(1, 1.0)]),
        ("complete", (math.nan,), ()),
        ("complete", (1.0,), ()),
    ]
    values = [3.0, 4.5, 4.5, 4.5, None, 4.5, 1.0]
    seen, meant = make_sampler(SPECS["gp"], SPACE, ONE, 0), make_sampler(SPECS["gp"], SPACE, ONE, 0)
    for number, (end, value) in enumerate(zip(ends, values, strict=True)):
        proposal = seen.ask(number)
        meant.adopt(record_of(number, proposal))
        seen.tell(record_of(number, proposal, *end))
        meant.tell(record_of(number, proposal, *(("failed",) if value is None else ("complete", (value,)))))
    assert seen.ask(7) == meant.ask(7)


@pytest.mark.parametrize("name", ["tpe", "gp", "cmaes", "nsga2", "nsga3", "bohb"])
def test_divergence_before_a_rung_keeps_proposals_away_like_one_after(name):
    space = Space({"x": Float(0.0, 1.0), "y": Float(0.0, 1.0)})
    spec = {"name": name, "population_size": 10} if name.startswith("nsga") else name
    asked = {}
    for state in ("infeasible", "pruned"):
        sampler = make_sampler(spec, space, ONE, 0)
        asked[state] = []
        for number in range(16 if name == "gp" else 30):
            asked[state].append(at := sampler.ask(number).coordinates)
            loss = (at["x"] - 0.49) ** 2 + (at["y"] - 0.5) ** 2
            if at["x"] > 0.5:
                sampler.tell(TrialRecord(number, state, at, None, [(1, loss), (4, math.nan)]))
            else:
                sampler.tell(TrialRecord(number, "complete", at, (loss,), [(1, loss), (4, loss), (9, loss)]))
    assert asked["pruned"] == asked["infeasible"]


def bohb_asked(state: str, loss: float, violations: tuple[float, ...] = ()) -> list[dict]:
    """What is asked for while trials of x < 0.3 end so, with such a loss at every epoch."""
    space, asked = Space({"x": Float(0.0, 1.0), "y": Float(0.0, 1.0)}), []
    sampler = make_sampler("bohb", space, ONE, 0)
    for number in range(60):
        asked.append(at := sampler.ask(number).coordinates)
        if at["x"] < 0.3:
            ended = TrialRecord(number, state, at, None, [(1, loss), (3, loss)], violations=violations)
        else:
            far, kept = (at["x"] - 0.6) ** 2 + (at["y"] - 0.5) ** 2, tuple(0.0 for _ in violations)
            ended = TrialRecord(number, "complete", at, (far,), [(1, far), (3, far)], violations=kept)
        sampler.tell(ended)
    return asked


def test_bohb_learns_nothing_from_the_losses_of_what_failed():
    assert bohb_asked("failed", -5.0) == bohb_asked("failed", 5.0)


def test_bohb_keeps_away_from_what_breaks_a_constraint():
    late = bohb_asked("pruned", -5.0, violations=(1.0,))[30:]
    assert sum(at["x"] < 0.3 for at in late) <= 8, "a third is at random: 3 of 30 are to be expected"


NUMBERS = Space({"a": Float(0.0, 1.0), "b": Float(1e-3, 1.0, log=True), "c": Int(0, 9), "d": Choice([1, 2])})


def test_cmaes_is_the_packages_own_loop():
    """Generation by generation in the unit cube; what is told is the point that the coordinates lie at."""
    unrounded = {"sampler cmaes": 1}
    sampler = make_sampler("cmaes", NUMBERS, [Objective("score", "maximize")], 1, versions=unrounded)
    paths = ("a", "b", "c")
    optimizer = cmaes.CMA(np.full(3, 0.5), 1 / 6, np.array([[0.0, 1.0]] * 3), 30, population_size=7)
    told = []
    for number in range(30):
        proposal = sampler.ask(number)
        optimizer.reseed_rng(ask_seed(1, number) % 2**32)
        point = optimizer.ask()
        at = {path: NUMBERS.dimensions[path].from_unit(u) for path, u in zip(paths, point, strict=True)}
        assert {path: proposal.coordinates[path] for path in paths} == at
        assert proposal.trial_attrs == {"cmaes:generation": number // 7}
        units = [NUMBERS.dimensions[path].to_unit(at[path]) for path in paths]
        score = -sum((u - 0.2) ** 2 for u in units)
        sampler.tell(record_of(number, proposal, "complete", (score,)))
        told.append((np.array(units), -score))
        if len(told) == 7:
            optimizer.tell(told)
            told = []


def test_cmaes_comes_to_the_best_and_starts_from_trials_of_another_origin():
    def best(count, others):
        sampler, found = make_sampler("cmaes", NUMBERS, ONE, 0), []
        for number in range(count):
            proposal = sampler.ask(number)
            at = proposal.coordinates
            found.append((at["a"] - 0.9) ** 2 + (math.log10(at["b"]) + 2.7) ** 2 / 9 + ((at["c"] - 1) / 9) ** 2)
            if number < others:  # as a user's own would be, which all lie near the best
                near = {"a": 0.88 + number / 1000, "b": 10**-2.7, "c": 1, "d": 0}
                sampler.tell(TrialRecord(number, "complete", near, (0.001 * number,)))
            else:
                sampler.tell(record_of(number, proposal, "complete", (found[-1],)))
        return found

    assert statistics.median(best(140, 0)[-20:]) < 0.01
    for others in (1, 12):
        assert statistics.median(best(24, others)[others:]) < statistics.median(best(24, 0)[others:]) / 2


LED = Space(
    {
        "lr": Float(1e-5, 1.0, log=True, prior=1e-3),
        "n": Int(1, 64),
        "kind": Choice(["a", "b", "c"], prior="b", strength=0.9),
    }
)


def test_enqueued_and_prior_draws_come_first_and_are_rebuilt(name, spec, length):
    """The sampler's own proposals begin behind them, and know of them where it has a memory."""
    queue = [{"lr": 0.5, "kind": "c"}, {"n": 64}]

    def begun():
        return make_sampler(spec, LED, ONE, 0, queue)

    golden, asked, told = begun(), [], []
    for number in range(length):
        asked.append(golden.ask(number))
        told.append(record_of(number, asked[-1], "complete", (float(number % 5),)))
        golden.tell(told[-1])
    assert (asked[0].coordinates["lr"], asked[0].coordinates["kind"], asked[1].coordinates["n"]) == (0.5, 2, 64)
    for cut in [cut for cut in (1, 2, 3, 9, 20) if cut < length]:
        again = begun()
        for record in told[:cut]:
            again.tell(stored(record))
        assert again.ask(cut) == asked[cut]
    plain = [make_sampler(spec, LED, ONE, 0).ask(number) for number in range(3)]
    if name in ("grid", "qmc"):
        assert [one.coordinates for one in asked[2:5]] == [one.coordinates for one in plain]
    elif name != "cmaes":
        random_ = make_sampler("random", LED, ONE, 0)
        drawn = [random_.ask(number).coordinates for number in range(3)]
        rounds = name in ("bohb", "freeze-thaw")  # which draw around priors themselves
        assert [one.coordinates for one in plain] == [as_proposed(LED, at) if rounds else at for at in drawn]


def test_cmaes_starts_at_the_priors():
    space = Space({path: Float(0.0, 1.0, prior=0.9) for path in "ab"})
    sampler = make_sampler("cmaes", space, ONE, 0)
    drawn = [value for number in range(40) for value in sampler.ask(number).coordinates.values()]
    assert statistics.mean(drawn) > 0.75, "0.5 without"


def test_auto_chooses_by_objectives_start_and_number():
    for objectives, warm, expected in [
        (1, False, {0: "freeze-thaw", 499: "freeze-thaw", 500: "tpe", 9999: "tpe"}),
        (1, True, {0: "tpe", 9999: "tpe"}),
        (2, False, {0: "tpe", 249: "tpe", 250: "nsga2"}),
        (4, True, {0: "tpe", 250: "nsga3"}),
    ]:
        assert {number: auto.choice(objectives, number, warm) for number in expected} == expected


def judged_late(curve, name: str) -> list[float]:
    """What the last 15 of 45 trials in a window of 4 come to at their ends, lower is better."""
    space = Space({"x": Float(0.0, 1.0), "y": Float(0.0, 1.0)})
    sampler, ends = make_sampler(name, space, ONE, 0), {}
    for number in range(45):
        if number >= 4:
            sampler.tell(ends[number - 4])
        at = sampler.ask(number).coordinates
        seen = curve(at["x"], at["y"])
        ends[number] = TrialRecord(number, "complete", at, (seen[-1][1],), seen)
    return [ends[number].values[0] for number in range(30, 45)]


def easier_first_fold(x: float, y: float) -> list[tuple[int, float]]:
    """The mean over folds so far: the first one is easier, and asks for another x than the four others."""
    folds = [0.2 * x, *[1 + 5 * (x - 0.8) ** 2] * 4]
    return [(k, sum(folds[:k]) / k + 0.1 * (y - 0.5) ** 2) for k in range(1, 6)]


def early_minimum(x: float, y: float) -> list[tuple[int, float]]:
    """The larger x, the faster the loss falls, and the more it rises again behind epoch 8."""
    return [(e, (1.2 - x) / e + 0.1 * (y - 0.5) ** 2 + 0.03 * x * max(0, e - 8)) for e in range(1, 28)]


@pytest.mark.parametrize("curve", [easier_first_fold, early_minimum])
def test_a_model_of_curves_learns_what_trials_are_judged_by(curve):
    """Their ends, where an objective selects the last value: what they came by on the way leads elsewhere."""
    assert statistics.median(judged_late(curve, "auto")) < 0.7 * statistics.median(judged_late(curve, "random"))


def test_the_model_does_not_mind_how_a_task_has_left_torch():
    import torch

    from hpo.search.promotion.curve_model import Model

    expected = judged_late(early_minimum, "freeze-thaw")
    Model.of.cache_clear()
    try:
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        assert judged_late(early_minimum, "freeze-thaw") == expected
    finally:
        torch.set_default_device(None)
        torch.set_grad_enabled(True)


def test_auto_looks_at_the_space_and_the_budget():
    few = Space({"a": Choice([1, 2, 3]), "b": Int(1, 4), "c": Bool()})
    assert auto.plan(few, 24) == auto.plan(few, 500) == {"grid": 24} and auto.plan(few, 23) == {}
    assert auto.plan(SPACE, 10) == {"qmc": 10} and auto.plan(SPACE, 11) == auto.plan(SPACE, None) == {}
    assert auto.plan(Space({"x": Float(0.0, 1.0, prior=0.5)}), 5) == {}, "priors say where to begin"
    sampler = make_sampler("auto", few, ONE, 0, [{"a": 2, "b": 3, "c": True}], planned={"grid": 24})
    asked = [json.dumps(few.decode(sampler.ask(number).coordinates)) for number in range(24)]
    assert len(set(asked)) == 24 and sampler.exhausted(24)
    spread, model = (make_sampler(name, SPACE, ONE, 0, planned={"qmc": 8}) for name in ("auto", "auto"))
    qmc = make_sampler("qmc", SPACE, ONE, 0)
    assert [spread.ask(n).coordinates for n in range(8)] == [qmc.ask(n).coordinates for n in range(8)]
    for number in range(8):  # a study that is given more goes on with the model, which knows these
        proposal = qmc.ask(number)
        model.tell(outcome(number, proposal, ONE, ("complete",)))
    known = make_sampler("freeze-thaw", SPACE, ONE, 0)
    for number in range(8):
        known.tell(outcome(number, qmc.ask(number), ONE, ("complete",)))
    assert model.ask(8) == known.ask(8)
    assert auto.rule(1, False, {"grid": 24}) == "grid, since there are 24 configurations, and trials for each of them"
    assert auto.rule(1, False, {"qmc": 8}).startswith("qmc for 8 trials, too few for a model, then f")


def test_auto_without_torch_keeps_tpe_with_the_study(monkeypatch):
    monkeypatch.setattr(auto, "find_spec", lambda name: None)
    planned = auto.plan(SPACE, None)
    assert planned == {"tpe": 0} and auto.plan(SPACE, 10) == {"qmc": 10, "tpe": 0}
    assert {auto.choice(1, number, planned=planned) for number in range(0, 600, 50)} == {"tpe"}
    monkeypatch.undo()  # as on a resume with torch
    sampler, tpe = make_sampler("auto", SPACE, ONE, 0, planned=planned), make_sampler("tpe", SPACE, ONE, 0)
    for number in range(14):
        proposal = tpe.ask(number)
        assert sampler.ask(number) == proposal
        for one in (sampler, tpe):
            one.tell(outcome(number, proposal, ONE, ("complete",)))
    assert auto.rule(1, False, planned) == "tpe, since the study was begun without PyTorch, which freeze-thaw needs"
    assert "PyTorch" not in auto.rule(2, False, planned)


def test_auto_goes_over_to_another_sampler_with_all_that_it_knows(monkeypatch):
    monkeypatch.setattr(auto, "FEW", 14)
    space = Space({"x": Float(0.0, 1.0), "y": Float(0.0, 1.0)})
    golden, told = make_sampler("auto", space, ONE, 0), []

    def taught(name):
        sampler = make_sampler(name, space, ONE, 0)
        for record in told:
            sampler.tell(record)
        return sampler

    for number in range(18):
        asked = golden.ask(number)
        for name in ("auto", "freeze-thaw" if number < 14 else "tpe"):
            assert taught(name).ask(number) == asked
        told.append(record_of(number, asked, "complete", (sum(u**2 for u in asked.coordinates.values()),)))
        golden.tell(told[-1])


def test_freeze_thaws_sampler_keeps_to_what_is_feasible_without_curves():
    """Best where x is allowed no more; violations grow with x, so that they lead back where every trial breaks it."""
    space = Space({"x": Float(0.0, 1.0), "y": Float(0.0, 1.0)})
    for bound in (0.5, 0.1):
        sampler, drawn = make_sampler("freeze-thaw", space, ONE, 0), []
        for number in range(45):
            drawn.append(at := sampler.ask(number).coordinates)
            over, loss = at["x"] - bound, -at["x"] + (at["y"] - 0.7) ** 2
            state = "infeasible" if over > 0 else "complete"
            sampler.tell(TrialRecord(number, state, at, (loss,), (), violations=(over,)))
        late = [at for number, at in enumerate(drawn) if number >= 24 and number % 3]
        assert sum(at["x"] > bound + 0.05 for at in late) <= 3
        assert statistics.median(abs(at["x"] - bound) + abs(at["y"] - 0.7) for at in late) < 0.15


@pytest.mark.parametrize(("finite", "state"), [(0, "infeasible"), (3, "infeasible"), (0, "pruned"), (3, "pruned")])
def test_freeze_thaws_sampler_keeps_away_from_what_diverges_early(finite, state):
    """Half of the space diverges after so many epochs, whose losses are the best there are."""
    space = Space({"x": Float(0.0, 1.0), "y": Float(0.0, 1.0)})
    sampler, drawn = make_sampler("freeze-thaw", space, ONE, 0), []
    for number in range(36):
        drawn.append(at := sampler.ask(number).coordinates)
        loss, record = (at["x"] - 0.3) ** 2 + (at["y"] - 0.7) ** 2, TrialRecord(number, state, at)
        if at["x"] > 0.5:
            curve = [(epoch, 0.3 / epoch) for epoch in range(1, finite + 1)] + [(finite + 1, math.nan)]
            sampler.tell(replace(record, curve=curve))
        else:
            curve = [(epoch, loss + 0.5 / epoch) for epoch in range(1, 10)]
            sampler.tell(replace(record, state="complete", values=(curve[-1][1],), curve=curve))
    late = [at for number, at in enumerate(drawn) if number >= 18 and number % 3]
    assert sum(at["x"] > 0.5 for at in late) <= 2, "9 of 12 where its end stood at its own epoch"


FEW = Space(
    {
        "name": Choice(["sgd", "adamw", "lion"]),
        "momentum": Float(0.0, 0.3, step=0.1, when={"name": "sgd"}),
        "heads": Int(1, 4, powers_of_two=True),
        "hidden": Int(8, 12, multiple_of="heads"),
    }
)


def test_few_configurations_are_not_repeated_while_others_are_left(name, spec):
    """Of 60: 6 numbers of heads and hidden, 5 + 3 + 2, for each of 3 names, sgd's with 4 momenta. A restart between
    any two asks changes nothing."""
    queue = [{"name": "lion", "heads": 2, "hidden": 8}] * 2
    size, length = FEW.grid(99).size, 14 if name == "gp" else 60
    assert size == 10 * (4 + 1 + 1) == 60

    def begun():
        return make_sampler(spec, FEW, ONE, 0, queue)

    live, told = begun(), []
    for number in range(length + 1):
        assert not live.exhausted(number)
        asked = live.ask(number)
        if number % 9 == 4:
            again = begun()
            for record in told:
                again.tell(stored(record))
            assert again.ask(number) == asked
        told.append(record_of(number, asked, "complete", (float(sum(asked.coordinates.values())),)))
        live.tell(told[-1])
    params = [json.dumps(FEW.decode(record.coordinates)) for record in told]
    assert params[0] == params[1], "what the user asks for twice is tried twice"
    assert len(set(params[1:])) == length
    assert set(params) <= {json.dumps(FEW.decode(FEW.grid(99).point(place))) for place in range(size)}
    if length == size:
        assert live.exhausted(size + 1) == "the space has 60 configurations, and each has been tried"
        live.tell(replace(told[-1], state="failed", untried=True))
        assert not live.exhausted(size + 1), "what was lost is there again"


@pytest.mark.parametrize("name", WARM)
@pytest.mark.parametrize("space", [SPACE, FEW], ids=["many", "few"])
def test_what_a_warm_start_knows_is_not_tried_again(name, space):
    """The earlier study has the same seed, so that random draws of both are the same. A restart changes nothing."""
    drawn = make_sampler("random", space, ONE, 3)
    known = [
        record_of(number, drawn.ask(number), "complete", (float(number),), [(1, number + 1.0), (2, float(number))])
        for number in range(14)
    ]
    tried = [space.decode(record.coordinates) for record in known]
    live = make_sampler(SPECS[name], space, ONE, 3, earlier=known)
    asked = [live.ask(number) for number in range(4)]

    def is_known(proposal):
        return any(is_alike(space.decode(proposal.coordinates), params) for params in tried)

    assert not [proposal for proposal in asked if is_known(proposal)]
    again = make_sampler(SPECS[name], space, ONE, 3, earlier=known)
    for number in range(3):
        again.adopt(stored(record_of(number, asked[number])))
    assert again.ask(3) == asked[3]
    before = make_sampler(SPECS[name], space, ONE, 3, earlier=known, versions={"warm start": 1})
    if name in ("freeze-thaw", "auto") and space is SPACE:
        assert is_known(before.ask(0)), "a study of the earlier rule goes on by it"


def test_once_a_warm_start_knows_all_that_is_left_it_is_tried_here_too():
    grid = make_sampler({"name": "grid", "points": 99}, FEW, ONE, 0)
    known = [record_of(number, grid.ask(number), "complete", (1.0,)) for number in range(58)]
    made = make_sampler("tpe", FEW, ONE, 0, earlier=known)
    asked = [json.dumps(FEW.decode(made.ask(number).coordinates)) for number in range(60)]
    assert {*asked[:2]} == {json.dumps(FEW.decode(FEW.grid(99).point(place))) for place in (58, 59)}
    assert len({*asked}) == 60 and made.exhausted(60)


@pytest.mark.parametrize("name", ["tpe", "nsga2", "auto"])
def test_a_replaced_proposal_is_in_the_model_without_a_rebuild(name, monkeypatch):
    """Of three trials that are open, each ask knows where they are, as one that is rebuilt does."""
    made, distinct = [], []
    monkeypatch.setattr(optuna_sampler, "quiet_study", lambda *given: made.append(given) or quiet_study(*given))
    monkeypatch.setattr(auto, "FEW", 12)
    ask = DeduplicatingSampler.ask
    monkeypatch.setattr(DeduplicatingSampler, "ask", lambda self, number: distinct.append(number) or ask(self, number))
    live, told, asked = make_sampler(SPECS[name], FEW, ONE, 0), [], []
    for number in range(60):
        asked.append(live.ask(number))
        if number % 9 == 4:
            before = len(made), len(distinct)
            again = make_sampler(SPECS[name], FEW, ONE, 0)
            for record in told:
                again.tell(stored(record))
            for place in range(len(told), number):
                again.adopt(stored(record_of(place, asked[place])))
            assert again.ask(number) == asked[-1]
            del made[before[0] :], distinct[before[1] :]
        if number >= 3:
            one = record_of(number - 3, asked[number - 3], "complete")
            told.append(replace(one, values=(float(sum(one.coordinates.values())),)))
            live.tell(told[-1])
    assert sum(proposal.draw for proposal in asked) > 9, "none was replaced"
    assert (len(made), distinct) == (1, list(range(60)))


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


def test_complete_trial_without_a_finite_value_is_never_scored():
    for value in (None, math.nan, math.inf):
        good, bad = Run("tpe", ONE), Run("tpe", ONE)
        for run, state in ((good, "infeasible"), (bad, "complete")):
            for _ in range(12):
                run.ask()
            for number in range(12):
                run.sampler.tell(TrialRecord(number, state, run.asked[number].coordinates, (value,), ()))
        assert good.sampler.ask(12) == bad.sampler.ask(12), value


def test_a_random_ask_makes_few_calls():
    """It takes far less than a millisecond, since there is neither a model nor a study of Optuna's."""
    sampler, calls = make_sampler("random", SPACE, ONE, 0), Counter()
    sys.setprofile(lambda frame, event, called: calls.update([event]))
    try:
        for number in range(100):
            sampler.ask(number)
    finally:
        sys.setprofile(None)
    assert 0 < calls["call"] + calls["c_call"] < 100 * 300, "a study of Optuna's takes 3000 for each"
