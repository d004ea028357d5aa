"""What every strategy promises: pure, repeatable decisions on losses; and each against an oracle."""

import json
import math
import random
import subprocess
import sys
import warnings

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mirrored import Made
from optuna.trial import TrialState, create_trial
from rounds import rounds

from hpo.errors import UserError
from hpo.ledger.history import Curves
from hpo.ledger.strategy_history import LedgerHistory
from hpo.search.population.base import PopulationStrategy
from hpo.search.promotion.base import PromotionStrategy, RungView
from hpo.search.samplers.base import TrialRecord
from hpo.search.samplers.registry import Random
from hpo.search.strategies.asha import Asha
from hpo.search.strategies.halving import Halving
from hpo.search.strategies.hyperband import Hyperband
from hpo.search.strategies.interval import IntervalStrategy
from hpo.search.strategies.median import Median
from hpo.search.strategies.patient import Patient
from hpo.search.strategies.percentile import Percentile
from hpo.search.strategies.registry import STRATEGIES, check_several, make_strategy
from hpo.search.strategies.table_history import TableHistory
from hpo.search.strategies.threshold import Threshold
from hpo.search.strategies.wilcoxon import Wilcoxon
from hpo.space.dimensions import Float
from hpo.space.objective import Objective
from hpo.space.space import Space
from hpo.storage.home import Home
from trainer.report import CONTINUE

SPECS = [
    {"name": "none"},
    {"name": "median"},
    {"name": "median", "n_startup_trials": 2, "n_warmup_epochs": 2, "interval": 3, "n_min_trials": 2},
    {"name": "percentile"},
    {"name": "percentile", "percentile": 60.0, "n_startup_trials": 2, "n_warmup_epochs": 2, "interval": 3},
    {"name": "patient"},
    {"name": "patient", "patience": 1, "strategy": None},
    {"name": "patient", "patience": 0, "strategy": make_strategy({"name": "asha", "eta": 2}).model_dump()},
    {"name": "threshold"},
    {"name": "threshold", "lower": 0.1, "upper": 0.7, "n_warmup_epochs": 2, "interval": 3},
    {"name": "wilcoxon"},
    {"name": "wilcoxon", "p_threshold": 0.3, "n_startup_epochs": 4},
    {"name": "paired"},
    {"name": "paired", "parts": 8, "p_threshold": 0.3, "n_startup": 3},
    {"name": "halving"},
    {"name": "halving", "min_epochs": 1, "eta": 2, "early_stopping_rate": 1, "bootstrap": 3},
    {"name": "asha"},
    {"name": "asha", "min_epochs": 2, "eta": 2},
    {"name": "asha", "eta": 4, "max_epochs": 9},
    {"name": "asha-promote"},
    {"name": "asha-promote", "min_epochs": 2, "eta": 2, "max_epochs": 9},
    {"name": "hyperband"},
    {"name": "hyperband", "eta": 2, "max_epochs": 12, "seed": 7},
    {"name": "pasha", "eta": 2},
    {"name": "hyperband-promote"},
    {"name": "freeze-thaw"},
    {"name": "bohb"},
    {"name": "pbt"},
    {"name": "pb2", "population": 3, "interval": 2},
]
# Decided by the order of losses, whatever their scale.
RANKED = ("none", "asha", "asha-promote", "halving", "hyperband")
WHOLE = ("median", "percentile", "patient", "wilcoxon")  # by whole curves of complete trials


def judged_alone(strategy):
    """Whether a strategy may stop a trial without having seen another."""
    if strategy.name == "threshold":
        return strategy.lower is not None or strategy.upper is not None
    return strategy.strategy is None if strategy.name == "patient" else bool(getattr(strategy, "bootstrap", 0))


@pytest.fixture(params=SPECS, ids=json.dumps)
def spec(request):
    return request.param


@pytest.fixture
def strategy(spec):
    return make_strategy(spec)


def curves(seed, trials=14, epochs=12, nan=0.05, every=1):
    """Losses of a study: number -> (epoch, loss), falling, noisy, at times not finite."""
    rng = random.Random(seed)
    table = {}
    for number in range(trials):
        level, last = rng.random(), rng.choice([epochs, epochs, rng.randint(1, epochs)])
        table[number] = [
            (epoch, math.nan if rng.random() < nan else round(level + rng.random() / epoch, 3))
            for epoch in range(every, last + 1, every)
        ]
    return {number: curve for number, curve in table.items() if curve}


def simulate(strategy, full, window=None):
    """Trials one after another, a verdict at every report that is wanted: (number, epoch) -> verdict."""
    tables, states, verdicts = {}, {}, {}
    for number, curve in full.items():
        states[number] = "complete"
        for length, (epoch, _) in enumerate(curve, 1):
            tables[number] = curve[:length]
            if not strategy.wants(epoch):
                continue
            visible = None if window is None else number - window
            verdict = strategy.decide(TableHistory(number, epoch, tables, states | {number: "running"}, visible))
            verdicts[number, epoch] = verdict
            if verdict.kind == "stop":
                states[number] = "pruned"
                break
    return verdicts, tables, states


def test_every_shipped_strategy_is_bound_here():
    assert {spec["name"] for spec in SPECS} == set(STRATEGIES)


def test_specification_survives_json():
    for spec in SPECS:
        strategy = make_strategy(spec)
        dumped = json.loads(json.dumps(strategy.model_dump()))
        assert dumped.items() >= spec.items()
        assert make_strategy(dumped) == strategy, spec
        assert make_strategy(spec["name"]).name == spec["name"]


def test_a_decision_is_a_function_of_the_history_alone(strategy, spec):
    """Decided again by a new object, from the JSON of the same history, in another order of its trials."""
    for seed in range(3):
        full = curves(seed)
        verdicts, tables, states = simulate(strategy, full)
        for (number, epoch), verdict in verdicts.items():
            seen = {other: curve for other, curve in tables.items() if other < number}
            seen[number] = [point for point in full[number] if point[0] <= epoch]
            shuffled = list(json.loads(json.dumps(list(seen.items()))))
            random.Random(seed).shuffle(shuffled)
            again = {other: [tuple(point) for point in curve] for other, curve in shuffled}
            known = {other: state for other, state in states.items() if other < number}
            decided = make_strategy(json.loads(json.dumps(spec))).decide(TableHistory(number, epoch, again, known))
            assert decided == verdict, f"seed {seed}, trial {number}, epoch {epoch}"


def asha_of(strategy, number, full_length):
    """The ASHA that decides on a trial, None where rungs do not come into it."""
    if isinstance(strategy, Hyperband):
        last = strategy.max_epochs or full_length
        first = strategy.min_epochs * strategy.eta ** strategy.bracket(number, strategy.brackets(last))
        return Asha(min_epochs=first, eta=strategy.eta, max_epochs=last)
    return strategy if isinstance(strategy, Asha) else None


def test_it_never_stops_twice_at_one_rung(strategy, spec):
    for seed, every in ((0, 1), (1, 1), (0, 2), (1, 5)):
        assert_judged_once_at_a_rung(strategy, spec, seed, every)


def assert_judged_once_at_a_rung(strategy, spec, seed, every):
    """Deciding on at each later report, a trial that went on from a rung is not judged there once more."""
    trials = 3 if strategy.name == "wilcoxon" else 14  # its test takes long where losses are equally far apart
    full = curves(seed, trials, nan=0.0, every=every)
    judged, where = {}, f"seed {seed}, a report every {every} epochs"
    for number, curve in full.items():
        for length, (epoch, _) in enumerate(curve, 1):
            if not strategy.wants(epoch):
                continue
            # Were this report judged, it would be stopped: every other trial has lost nothing at all.
            tables = {k: [(e, -1.0) for e, _ in curve] for k in range(100, 140)} | {number: curve[:length]}
            states = dict.fromkeys(range(100, 140), "complete")
            if strategy.decide(TableHistory(number, epoch, tables, states)).kind in ("stop", "pause"):
                judged.setdefault(number, []).append(epoch)
    for number, epochs in judged.items():
        if asha := asha_of(strategy, number, full[number][-1][0]):
            rungs = [asha.rung(epoch) for epoch in epochs]
            assert len(set(rungs)) == len(rungs), where
        elif isinstance(strategy, IntervalStrategy):
            intervals = [(epoch - strategy.n_warmup_epochs) // strategy.interval for epoch in epochs]
            assert len(set(intervals)) == len(intervals), where
    if every == 1:
        assert bool(judged) == (spec not in ({"name": "none"}, {"name": "threshold"})), where


@pytest.mark.parametrize("spec", [one for one in SPECS if not judged_alone(make_strategy(one))], ids=json.dumps)
def test_the_only_trial_goes_on(strategy):
    may_pause = isinstance(strategy, PromotionStrategy | PopulationStrategy)
    for seed in range(4):
        [curve] = curves(seed, trials=1, nan=0.0).values()
        for length, (epoch, _) in enumerate(curve, 1):
            verdict = strategy.decide(TableHistory(0, epoch, {0: curve[:length]}))
            goes_on = verdict.kind in ("continue", "pause") if may_pause else verdict == CONTINUE
            assert goes_on, f"seed {seed}, epoch {epoch}"


def test_only_what_a_window_lets_be_known_counts(strategy):
    """Of the trials less than a window before it how they ended does not, nor what they reported after its epoch; of
    those after it nothing does."""
    for seed in range(4):
        full = curves(seed)
        narrow, tables, states = simulate(strategy, full, window=3)
        for (number, epoch), verdict in narrow.items():
            upto = {k: [point for point in curve if point[0] <= epoch] for k, curve in full.items() if k > number - 3}
            kept = {k: curve for k, curve in tables.items() if k <= number - 3} | upto
            kept |= {k: [point for point in tables[k] if point[0] <= epoch] for k in tables if number - 3 < k < number}
            known = {k: states.get(k, "running") if k <= number - 3 else "running" for k in kept}
            decided = strategy.decide(TableHistory(number, epoch, kept, known, number - 3))
            assert decided == verdict, f"seed {seed}, trial {number}, epoch {epoch}"


def test_the_best_at_every_epoch_goes_on(strategy):
    """So the best of a study only ever improves: nobody ahead of all others is stopped, or put in another's place, and
    who pauses there goes on, at the latest once no more trials come, to its end."""
    for seed in range(3):
        others = {n: [(e, 0.8 + x) for e, x in curve] for n, curve in curves(seed).items()}
        leader = [(epoch, 0.5 - 0.02 * epoch) for epoch in range(1, 13)]
        states = {n: "complete" if len(curve) == 12 else "pruned" for n, curve in others.items()}
        for length, (epoch, _) in enumerate(leader, 1):
            if strategy.wants(epoch):
                known = others | {99: leader[:length]}
                verdict = strategy.decide(TableHistory(99, epoch, known, states))
                assert verdict.kind in ("continue", "pause"), f"seed {seed}: {verdict}"
                if verdict.kind == "pause":
                    on = strategy.promote(RungView(known, states | {99: "paused"}), last=True)
                    assert 99 in on, f"seed {seed}: it waits for ever"


@pytest.mark.parametrize("spec", WHOLE)
def test_curves_of_trials_that_failed_are_held_against_nobody(strategy):
    full = curves(3, nan=0.0)
    broken = {200 + n: [(e, -1.0) for e, _ in curve] for n, curve in full.items()}
    verdicts, tables, states = simulate(strategy, full)
    for state in ("failed", "infeasible"):
        known = states | dict.fromkeys(broken, state)
        for (number, epoch), verdict in verdicts.items():
            seen = {n: curve for n, curve in tables.items() if n < number}
            seen[number] = [point for point in full[number] if point[0] <= epoch]
            now = {n: known[n] for n in (*seen, *broken)} | {number: "running"}
            decided = strategy.decide(TableHistory(number, epoch, seen | broken, now))
            assert decided == verdict, f"{state}, trial {number}, epoch {epoch}"


@pytest.mark.parametrize("spec", [one for one in SPECS if one["name"] != "threshold"], ids=json.dumps)
def test_only_the_order_of_losses_matters(strategy):
    """So an objective that is maximised is decided like its negative, whatever its scale."""
    for seed in range(3):
        full = curves(seed)
        halved = {n: [(e, x / 2) for e, x in curve] for n, curve in full.items()}
        bent = {n: [(e, math.exp(x)) for e, x in curve] for n, curve in full.items()}
        kinds = {key: verdict.kind for key, verdict in simulate(strategy, full)[0].items()}
        for other in [halved, bent] if strategy.name in RANKED else [halved]:
            assert {key: verdict.kind for key, verdict in simulate(strategy, other)[0].items()} == kinds, f"seed {seed}"


@rounds("value", [math.nan, math.inf])
def test_what_is_not_finite_ranks_behind_everything(value):
    good = {n: [(1, 0.5)] for n in range(6)}
    states = dict.fromkeys(good, "complete")
    for strategy in (Asha(min_epochs=1), Halving(), Hyperband(max_epochs=1 + 1, eta=3), Median(), Percentile()):
        verdict = strategy.decide(TableHistory(6, 1, good | {6: [(1, value)]}, states))
        assert verdict.kind == "stop" and verdict.reason
        bad = {n: [(1, value)] for n in range(6)}
        assert strategy.decide(TableHistory(6, 1, bad | {6: [(1, 0.5)]}, states)) == CONTINUE


# Of a study of 16 trials: in each third trial some losses are not finite.
WHOLE_LENGTH, ENDS = 10, ("complete", "complete", "paused", "pruned")
SPACE = Space({"lr": Float(0.0, 1.0)})


def in_ledger(home, objective, odd):
    """The study, told with `odd` wherever a loss is not finite: numbers, trial ids, and what reads its curves."""
    made, sign, rng, ids = Made(home), -1.0 if objective.direction == "maximize" else 1.0, random.Random(5), []
    made.ask(16)
    for number in range(16):
        taken, end = made.claim(), ENDS[number % len(ENDS)]
        ids.append(taken.trial_id)
        last = WHOLE_LENGTH if end == "complete" else rng.randint(1, WHOLE_LENGTH)
        for epoch in range(1, last + 1):
            spoilt, loss = number % 3 == 1 and rng.random() < 0.4, rng.random() + 1 / epoch
            made.report(taken, epoch, {"val/loss": odd if spoilt else sign * loss}, epoch=epoch)
        made.finish(taken, end, last, [0.5])
    return made, ids, Curves(made.id, [objective])


@pytest.fixture(scope="module", params=["minimize", "maximize"])
def told(request, tmp_path_factory):
    """The study with NaN, with infinity and with minus infinity."""
    objective, home = Objective("val/loss", request.param), tmp_path_factory.mktemp(request.param)
    odds = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    return {name: in_ledger(Home(home / name), objective, odd) for name, odd in odds.items()}


def everything_decided(strategy, made, ids, curves):
    """Every verdict, and what goes on or is bred from the whole study."""
    found = []
    with made.ledger.read() as connection:
        whole = curves.upto(connection, None)
        for number, (_, curve) in whole.items():
            for epoch in [epoch for epoch, _ in curve if strategy.wants(epoch)]:
                history = LedgerHistory(curves, connection, ids[number], number, epoch, None)
                found.append((number, epoch, strategy.decide(history)))
    if isinstance(strategy, PromotionStrategy):
        points = {number: (number / 16,) for number in whole}
        board = RungView(curves.curves, curves.states, points, curves.order)
        found += [list(strategy.promote(board, last)) for last in (False, True)]
    if isinstance(strategy, PopulationStrategy):
        sampler = strategy.sampler(Random(SPACE, curves.objectives, 0), SPACE, curves.objectives, 0)
        begin = strategy.begin(len(whole))
        for number in range(begin):
            values = [(epoch, curves.flipped([loss])) for epoch, loss in whole[number][1]]
            sampler.tell(TrialRecord(number, "pruned", {"lr": number / 16}, curve=values))
        found += [sampler.ask(number) for number in range(begin, begin + strategy.population)]
    return found


def test_an_infinity_of_either_sign_is_decided_as_nan_is(told):
    """A value that is not finite is none, whichever way it points: so the ledger says it to every strategy."""
    for strategy in map(make_strategy, {spec["name"]: spec for spec in SPECS}.values()):  # the last of each name
        expected = everything_decided(strategy, *told["nan"])
        for odd in ("inf", "-inf"):
            assert everything_decided(strategy, *told[odd]) == expected, f"{odd}, {strategy!r}"


@rounds(
    ("spec", "words"),
    [
        ("ahsa", ["unknown strategy 'ahsa'", "did you mean 'asha'"]),
        ({}, ["unknown strategy None"]),
        ({"name": "asha", "eat": 3}, ["no option 'eat'", "did you mean 'eta'"]),
        ({"name": "asha", "eta": 1}, ["eta=1", "greater than or equal to 2"]),
        ({"name": "asha", "eta": "3"}, ["eta='3'", "integer"]),
        ({"name": "median", "interval": 0}, ["interval=0"]),
        ({"name": "none", "eta": 1}, ["it has none"]),
        ({"name": "percentile", "percentile": 101}, ["percentile=101", "less than or equal to 100"]),
        ({"name": "patient", "strategy": "medain"}, ["unknown strategy 'medain'", "did you mean 'median'"]),
        ({"name": "patient", "strategy": {"name": "asha", "eta": 1}}, ["strategy 'asha'", "eta=1"]),
        ({"name": "patient", "strategy": "asha-promote"}, ["cannot ask 'asha-promote'", "give another"]),
        ({"name": "patient", "strategy": "pbt"}, ["cannot ask 'pbt'", "give another"]),
        ({"name": "patient", "strategy": {"name": "pb2", "interval": 2}}, ["cannot ask 'pb2'", "give another"]),
        ({"name": "patient", "strategy": 3}, ["strategy 'patient'", "strategy=3"]),
        ({"name": "threshold", "lower": 2.0, "upper": 1.0}, ["lower=2", "above upper=1"]),
        ({"name": "threshold", "upper": math.nan}, ["upper=nan", "finite"]),
        ({"name": "wilcoxon", "p_threshold": 2.0}, ["p_threshold=2.0"]),
    ],
)
def test_wrong_specifications_are_refused_in_one_sentence(spec, words):
    with pytest.raises(UserError) as caught:
        make_strategy(spec)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


# --- Oracles


def optuna_decisions(pruner, full, name=None):
    """The same study under optuna's own pruner, trials one after another: (number, epoch) -> pruned?"""
    study = optuna.create_study(pruner=pruner, study_name=name)
    verdicts = {}
    for number, curve in full.items():
        trial = study.ask()
        for epoch, loss in curve:
            trial.report(loss, epoch)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # numpy's, of slices that are all NaN; optuna's, of epochs not shared
                verdicts[number, epoch] = trial.should_prune()
            if verdicts[number, epoch]:
                study.tell(trial, state=TrialState.PRUNED)
                break
        else:
            mean = sum(loss for _, loss in curve) / len(curve)
            study.tell(trial, mean if math.isfinite(mean) else 0.0)
    return verdicts


def assert_alike(strategy, pruner, studies, at_least, **options):
    """Each of `studies`, decided by both; `at_least` trials are stopped in all."""
    stops = 0
    for full in studies:
        expected = optuna_decisions(pruner(), full, **options)
        verdicts, _, _ = simulate(strategy, full)
        assert {key: key in verdicts and verdicts[key].kind == "stop" for key in expected} == expected
        stops += sum(expected.values())
    assert stops >= at_least, "the comparison has seen trials stop"


def steps(options):
    """Options with the names that optuna has for them."""
    known = {"n_warmup_epochs": "n_warmup_steps", "interval": "interval_steps", "n_startup_epochs": "n_startup_steps"}
    return {known.get(name, name): value for name, value in options.items()}


def experimental(pruner, *given, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return pruner(*given, **options)


@rounds("every", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_startup_trials": 0},
        {"n_startup_trials": 2, "n_warmup_epochs": 3},
        {"n_startup_trials": 1, "n_warmup_epochs": 1, "interval": 4},
        {"n_startup_trials": 1, "n_min_trials": 4, "interval": 2},
    ],
    ids=str,
)
def test_median_and_percentile_are_optunas(options, every):
    studies = [curves(seed, trials=20, every=every) for seed in range(6)]
    given = {"n_startup_trials": 5} | steps(options)
    assert_alike(Median(**options), lambda: optuna.pruners.MedianPruner(**given), studies, 11)
    for percentile in (10.0, 25.0, 70.0):
        assert_alike(
            Percentile(percentile=percentile, **options),
            lambda p=percentile: optuna.pruners.PercentilePruner(p, **given),
            studies[:2],
            1,
        )


@rounds("every", [1, 3])
@rounds(
    "options",
    [{"upper": 0.8}, {"lower": 0.3, "n_warmup_epochs": 3}, {"lower": 0.1, "upper": 1.0, "interval": 4}],
)
def test_threshold_is_optunas_threshold_pruner(options, every):
    studies = [curves(seed, trials=20, every=every) for seed in range(8)]
    assert_alike(Threshold(**options), lambda: optuna.pruners.ThresholdPruner(**steps(options)), studies, 11)


@rounds("every", [1, 2])
@pytest.mark.parametrize(
    "options", [{"patience": 0}, {"patience": 1}, {"patience": 2, "min_delta": 0.05}, {"patience": 4}], ids=str
)
@rounds("wrapped", [None, {"name": "median", "n_startup_trials": 2, "interval": 2}])
def test_patient_is_optunas_patient_pruner(options, every, wrapped):
    """On either pruner, as both are told to ask no more of it than of the trial's own losses and the complete ones."""
    inner = wrapped and optuna.pruners.MedianPruner(n_startup_trials=2, interval_steps=2)
    studies = [curves(seed, trials=20, every=every, nan=0.1) for seed in range(5)]
    pruner = experimental(optuna.pruners.PatientPruner, inner, **options)
    assert_alike(Patient(strategy=wrapped, **options), lambda: pruner, studies, int(every == 1))


@rounds("every", [1, 2])
@pytest.mark.parametrize("options", [{}, {"p_threshold": 0.4}, {"p_threshold": 0.3, "n_startup_epochs": 5}], ids=str)
def test_wilcoxon_is_optunas_wilcoxon_pruner(options, every):
    studies = [curves(seed, trials=10, epochs=9, every=every, nan=0.0) for seed in range(2)]
    pruner = experimental(optuna.pruners.WilcoxonPruner, **steps(options))
    assert_alike(Wilcoxon(**options), lambda: pruner, studies, int(every == 1))


def test_wilcoxon_holds_no_trial_against_one_that_is_not_finite():
    spoilt, fair = [(e, 0.0) for e in range(1, 8)] + [(8, math.nan)], [(e, 0.5) for e in range(1, 9)]
    own = [(e, 1.0 + e / 10) for e in range(1, 9)]
    states = {0: "complete", 1: "complete"}
    assert Wilcoxon().decide(TableHistory(2, 8, {0: spoilt, 2: own}, states)) == CONTINUE
    assert (
        "above trial 1 in 8 epochs"
        in Wilcoxon().decide(TableHistory(2, 8, {0: spoilt, 1: fair, 2: own}, states)).reason
    )


IMPORTS = """
import sys
from hpo.search.strategies.registry import make_strategy
from hpo.search.strategies.table_history import TableHistory

strategy = make_strategy("wilcoxon")
assert not strategy.wants(1) and "scipy" not in sys.modules
assert strategy.wants(8)
known = set(sys.modules)
curves = {n: [(epoch, n + epoch / 10) for epoch in range(1, 9)] for n in (0, 1)}
assert strategy.decide(TableHistory(1, 8, curves, {0: "complete"})).kind == "stop"
assert known == set(sys.modules), sorted(set(sys.modules) - known)
"""


@pytest.mark.usefixtures("process")
def test_wilcoxon_imports_nothing_as_it_decides():
    """Other trials' reports wait for a decision, which holds the ledger's write lock."""
    ran = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


class Long(list):
    """A curve that is looked up in."""

    def __iter__(self):
        raise AssertionError("it was read from end to end")


@rounds("name", ["median", "percentile"])
def test_one_epoch_of_complete_curves_is_looked_up(name):
    complete = {n: Long((epoch, n / epoch) for epoch in range(1, 200)) for n in range(6)}
    states = dict.fromkeys(complete, "complete")
    verdict = make_strategy(name).decide(TableHistory(9, 50, complete | {9: [(50, 0.2)]}, states))
    assert verdict.kind == "stop" and "of 6 trials at epoch 50" in verdict.reason


@pytest.mark.parametrize(("min_epochs", "eta"), [(1, 2), (1, 3), (2, 3), (1, 4)])
def test_asha_is_optunas_successive_halving_pruner(min_epochs, eta):
    """Where they mean the same: every epoch reported, values finite, so that each rung is met on its own epoch."""
    studies = [curves(seed, trials=30, epochs=20, nan=0.0) for seed in range(12)]
    options = {"min_resource": min_epochs, "reduction_factor": eta}
    pruner = optuna.pruners.SuccessiveHalvingPruner
    assert_alike(Asha(min_epochs=min_epochs, eta=eta), lambda: pruner(**options), studies, 101)
    for rate, bootstrap in [(0, 0), (0, 3), (1, 0), (1, 2)]:
        assert_alike(
            Halving(min_epochs=min_epochs, eta=eta, early_stopping_rate=rate, bootstrap=bootstrap),
            lambda rate=rate, count=bootstrap: pruner(**options, min_early_stopping_rate=rate, bootstrap_count=count),
            studies[:3],
            20,
        )


@pytest.mark.parametrize(("min_epochs", "eta", "max_epochs"), [(1, 2, 21), (1, 3, 21), (2, 3, 21), (1, 4, 70)])
def test_hyperband_is_optunas_hyperband_pruner(min_epochs, eta, max_epochs):
    """Of a study that is called as the seed is: the brackets are dealt out by the same checksum."""
    studies = [curves(seed, trials=40, epochs=20, nan=0.0) for seed in range(5)]
    options = {"min_resource": min_epochs, "max_resource": max_epochs, "reduction_factor": eta}
    strategy = Hyperband(min_epochs=min_epochs, eta=eta, max_epochs=max_epochs, seed=5)
    assert_alike(strategy, lambda: optuna.pruners.HyperbandPruner(**options), studies, 50, name="5")


def test_halving_where_reports_jump_over_a_rung_stops_less_than_optuna():
    """Rungs at 3 and 9, reports at 1 and 9: the one at 9 is compared once, and by optuna at either rung."""
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=3, reduction_factor=3)
    more = 0
    for seed in range(6):
        full = {n: [point for point in c if point[0] in (1, 9)] for n, c in curves(seed, 30, 9, nan=0.0).items()}
        theirs = {key for key, pruned in optuna_decisions(pruner, full).items() if pruned}
        ours = {key for key, verdict in simulate(Asha(min_epochs=3), full)[0].items() if verdict.kind == "stop"}
        assert ours <= theirs and {epoch for _, epoch in theirs} == {9}
        more += len(theirs - ours)
    assert more > 0


def test_a_trial_that_is_nan_at_a_rung_counts_there_and_not_for_optuna():
    """Both stop it. Of six that have come to the rung two go on; to optuna only two have, of which one does."""
    full = {n: [(1, math.nan)] for n in range(4)} | {4: [(1, 0.1)], 5: [(1, 0.2)]}
    theirs = optuna_decisions(optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3), full)
    ours = {key: verdict.kind == "stop" for key, verdict in simulate(Asha(min_epochs=1), full)[0].items()}
    assert [theirs[n, 1] for n in range(6)] == [True] * 4 + [False, True]
    assert [ours[n, 1] for n in range(6)] == [True] * 4 + [False, False]


def test_hyperbands_brackets_follow_the_longest_and_optunas_the_first():
    """Without the full length: optuna adds one to the first complete trial's, and keeps to that."""
    pruner = optuna.pruners.HyperbandPruner(min_resource=1, reduction_factor=3)
    full = {n: [(epoch, 0.5) for epoch in range(1, length + 1)] for n, length in enumerate((8, 8, 27, 27))}
    optuna_decisions(pruner, full)
    assert pruner._n_brackets == 3 and pruner._max_resource == 9
    assert [len(Hyperband().brackets(length)) for length in (8, 9, 27)] == [2, 3, 4]


def test_hyperband_has_the_papers_brackets():
    """Li et al. 2018, algorithm 1: R = 81, eta = 3, n of s = 4 .. 0; the first rungs are at R eta^-s."""
    strategy = Hyperband(max_epochs=81)
    assert strategy.brackets(81) == [81, 34, 15, 8, 5]
    assert strategy.brackets(80) == [27 * 4 // 4, 12, 6, 4] and Hyperband(min_epochs=9).brackets(5) == [1]
    dealt = [strategy.bracket(number, strategy.brackets(81)) for number in range(4000)]
    shares = [dealt.count(bracket) / 4000 for bracket in range(5)]
    assert all(abs(share - size / 143) < 0.03 for share, size in zip(shares, [81, 34, 15, 8, 5], strict=True))
    assert dealt[:50] != [Hyperband(seed=1).bracket(number, [81, 34, 15, 8, 5]) for number in range(50)]


def test_hyperband_takes_the_full_length_of_complete_trials():
    """Before one is complete it stops nothing, since it does not know which brackets there are."""
    good, own = {n: [(1, 0.1), (2, 0.1)] for n in range(30)}, [(1, 0.9)]
    assert Hyperband().decide(TableHistory(99, 1, good | {99: own})) == CONTINUE
    states = dict.fromkeys(good, "complete")
    assert Hyperband().decide(TableHistory(99, 1, good | {99: own}, states)).kind == "stop"


def test_hyperband_keeps_its_brackets_where_the_full_length_is_given():
    """Without it trial 0 is in bracket 1 of 3 while the longest complete trial has 9 epochs, and in 3 of 4 at 27."""
    assert [Hyperband().bracket(0, Hyperband().brackets(length)) for length in (9, 26, 27)] == [1, 1, 3]
    good = {n: [(3, 0.1)] for n in range(100, 130)}
    for length, freely in ((9, "stop"), (27, "continue")):  # bracket 1 has a rung at epoch 3, bracket 3 has none yet
        tables = good | {99: [(length, 0.1)], 0: [(3, 0.9)]}
        history = TableHistory(0, 3, tables, {99: "complete"})
        assert Hyperband().decide(history).kind == freely
        assert Hyperband(max_epochs=9).decide(history).kind == "stop"


SEVERAL = [spec for spec in SPECS if getattr(make_strategy(spec), "several", False)]


@pytest.mark.parametrize("spec", SEVERAL, ids=json.dumps)
def test_several_objectives_are_ranked_by_non_domination(strategy):
    """Where each loss is doubled, one objective decides, and as it does alone; else a place is that among fronts."""
    for seed in range(3):
        full = curves(seed, nan=0.0)
        alone, _, _ = simulate(strategy, full)
        doubled = {n: [(epoch, (loss, loss)) for epoch, loss in curve] for n, curve in full.items()}
        twice, _, _ = simulate(strategy, doubled)
        assert {at: one.kind for at, one in twice.items()} == {at: one.kind for at, one in alone.items()}, (
            f"seed {seed}"
        )


def test_asha_keeps_the_first_fronts_of_a_rung():
    for seed in range(6):
        assert_first_fronts_kept(random.Random(seed), f"seed {seed}")


def assert_first_fronts_kept(rng, where):
    losses = {number: (round(rng.random(), 1), round(rng.random(), 1)) for number in range(rng.randint(3, 30))}
    own, eta = max(losses), 3
    tables = {number: [(1, loss)] for number, loss in losses.items()}
    verdict = Asha(min_epochs=1, eta=eta).decide(TableHistory(own, 1, tables))
    keep = max(1, len(losses) // eta)

    def beaten(number, among):
        a = losses[number]
        return [o for o in among if losses[o] != a and losses[o][0] <= a[0] and losses[o][1] <= a[1]]

    left, ahead = set(losses), 0  # how many lie in fronts before its own, by every pair compared
    while beaten(own, left):
        first = {number for number in left if not beaten(number, left)}
        left, ahead = left - first, ahead + len(first)
    own_front = [number for number in left if not beaten(number, left)]
    if ahead + len(own_front) <= keep:
        assert verdict.kind == "continue", where
    if ahead >= keep:
        assert verdict.kind == "stop", where
    assert (
        Asha(min_epochs=1, eta=eta).decide(TableHistory(own, 1, tables | {own: [(1, (0.0, math.nan))]})).kind == "stop"
    ), where


def test_strategies_for_one_objective_are_refused_with_several():
    for spec in SPECS:
        strategy = make_strategy(spec)
        check_several(strategy, 1)
        if spec not in SEVERAL:
            with pytest.raises(UserError, match=f"strategy '{spec['name']}' takes one objective and the study has 2"):
                check_several(strategy, 2)


@given(
    st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.4, math.inf, math.nan]), max_size=30), st.floats(0, 1), st.integers(2, 5)
)
@settings(max_examples=300, deadline=None)
def test_asha_keeps_the_papers_top_fraction(others, own, eta):
    """Li et al. 2020, algorithm 2, `top_k(rung, |rung| / eta)`, ties in favour; the best so far while that is empty."""
    ranked = sorted([math.inf if math.isnan(loss) else loss for loss in others] + [own])
    k = max(1, len(ranked) // eta)
    expected = own in ranked[:k]
    tables = {n: [(eta, loss)] for n, loss in enumerate(others)} | {99: [(eta, own)]}
    assert (Asha(min_epochs=1, eta=eta).decide(TableHistory(99, eta, tables)) == CONTINUE) == expected


def test_asha_rungs_are_geometric_below_the_full_length():
    strategy = Asha(min_epochs=2, eta=3, max_epochs=54)
    met = [e for e in range(60) if strategy.rung(e) is not None and strategy.rung(e) != strategy.rung(e - 1)]
    assert met == [2, 6, 18], "54 is the end: a trial that got there is complete"


def test_table_history_shows_the_past_of_one_report():
    history = TableHistory(
        1, 2, {0: [(1, 5.0), (2, 4.0)], 1: [(1, 3.0), (2, 2.0), (3, 1.0)], 7: [(2, 9.0)]}, {0: "complete"}, 1
    )
    assert history.value == 2.0 and list(history.curve) == [(1, 3.0), (2, 2.0)]
    assert history.at(2) == {0: 4.0} and list(history.curves()) == [0] and list(history.curves(("running",))) == []


def test_optuna_accepts_what_the_oracle_is_fed():
    """The table's NaN and infinities reach optuna as they are."""
    trial = create_trial(value=0.0, intermediate_values={1: math.nan, 2: math.inf})
    assert math.isnan(trial.intermediate_values[1]) and trial.intermediate_values[2] == math.inf


def test_losses_beyond_bounds_go_to_those_that_only_rank():
    """What does arithmetic on losses, or models them, has them as they are; `paired` needs to know which break one."""
    ranking = {name for name in STRATEGIES if make_strategy(name).rungs}
    assert ranking == {"paired", "asha", "halving", "hyperband", "asha-promote", "hyperband-promote", "bohb"}
