"""What every strategy promises: pure, repeatable decisions on losses; and each against an oracle."""

import json
import math
import random
import warnings

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState, create_trial

from hpo.errors import UserError
from hpo.search.asha import Asha
from hpo.search.median import Median
from hpo.search.promotion import Promoting
from hpo.search.strategy import STRATEGIES, TableHistory, make_strategy
from trainer.report import CONTINUE

SPECS = [
    {"name": "none"},
    {"name": "median"},
    {"name": "median", "n_startup_trials": 2, "n_warmup_epochs": 2, "interval": 3, "n_min_trials": 2},
    {"name": "asha"},
    {"name": "asha", "min_epochs": 2, "eta": 2},
    {"name": "asha", "eta": 4, "max_epochs": 9},
    {"name": "asha-promote"},
    {"name": "asha-promote", "min_epochs": 2, "eta": 2, "max_epochs": 9},
    {"name": "pasha", "eta": 2},
]


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


def test_specification_survives_json(strategy, spec):
    dumped = json.loads(json.dumps(strategy.model_dump()))
    assert dumped.items() >= spec.items()
    assert make_strategy(dumped) == strategy
    assert make_strategy(spec["name"]).name == spec["name"]


@pytest.mark.parametrize("seed", range(6))
def test_a_decision_is_a_function_of_the_history_alone(strategy, spec, seed):
    """Decided again by a new object, from the JSON of the same history, in another order of its trials."""
    full = curves(seed)
    verdicts, _, _ = simulate(strategy, full)
    seen, states = {}, {}
    for (number, epoch), verdict in verdicts.items():
        for other in seen:
            states[other] = states.get(other, "complete")
        tables = {other: curve for other, curve in seen.items() if other != number}
        tables[number] = [point for point in full[number] if point[0] <= epoch]
        shuffled = list(json.loads(json.dumps(list(tables.items()))))
        random.Random(seed).shuffle(shuffled)
        again = {other: [tuple(point) for point in curve] for other, curve in shuffled}
        known = {other: state for other, state in states.items() if other != number}
        repeated = make_strategy(json.loads(json.dumps(spec))).decide(TableHistory(number, epoch, again, known))
        assert repeated == verdict
        seen[number] = tables[number] if verdict.kind == "stop" else full[number]
        if verdict.kind == "stop":
            states[number] = "pruned"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("every", [1, 2, 5])
def test_it_never_stops_twice_at_one_rung(strategy, seed, every):
    """Deciding on at each later report, a trial that went on from a rung is not judged there once more."""
    full = curves(seed, nan=0.0, every=every)
    judged = {}
    for number, curve in full.items():
        for length, (epoch, _) in enumerate(curve, 1):
            if not strategy.wants(epoch):
                continue
            # Were this report judged, it would be stopped: every other trial has lost nothing at all.
            tables = {k: [(e, -1.0) for e, _ in curve] for k in range(100, 140)} | {number: curve[:length]}
            states = dict.fromkeys(range(100, 140), "complete")
            if strategy.decide(TableHistory(number, epoch, tables, states)).kind in ("stop", "pause"):
                judged.setdefault(number, []).append(epoch)
    for epochs in judged.values():
        if isinstance(strategy, Asha):
            rungs = [strategy.rung(epoch) for epoch in epochs]
            assert len(set(rungs)) == len(rungs)
        elif isinstance(strategy, Median):
            intervals = [(epoch - strategy.n_warmup_epochs) // strategy.interval for epoch in epochs]
            assert len(set(intervals)) == len(intervals)
    assert bool(judged) == (strategy.name != "none")


@pytest.mark.parametrize("seed", range(4))
def test_the_only_trial_goes_on(strategy, seed):
    [curve] = curves(seed, trials=1, nan=0.0).values()
    for length, (epoch, _) in enumerate(curve, 1):
        verdict = strategy.decide(TableHistory(0, epoch, {0: curve[:length]}))
        assert verdict.kind in ("continue", "pause") if isinstance(strategy, Promoting) else verdict == CONTINUE


@pytest.mark.parametrize("seed", range(4))
def test_only_visible_trials_count(strategy, seed):
    full = curves(seed)
    narrow, tables, states = simulate(strategy, full, window=3)
    for (number, epoch), verdict in narrow.items():
        kept = {k: curve for k, curve in tables.items() if k <= number - 3}
        kept[number] = [point for point in full[number] if point[0] <= epoch]
        known = {k: states[k] for k in kept if k != number}
        assert strategy.decide(TableHistory(number, epoch, kept, known)) == verdict


@given(st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_only_the_order_of_losses_matters(seed):
    """So an objective that is maximised is decided like its negative, whatever its scale."""
    full = curves(seed)
    halved = {n: [(e, x / 2) for e, x in curve] for n, curve in full.items()}
    bent = {n: [(e, math.exp(x)) for e, x in curve] for n, curve in full.items()}
    for spec in SPECS:
        strategy = make_strategy(spec)
        kinds = {key: verdict.kind for key, verdict in simulate(strategy, full)[0].items()}
        for other in [halved, bent] if strategy.name == "asha" else [halved]:
            assert {key: verdict.kind for key, verdict in simulate(strategy, other)[0].items()} == kinds


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_ranks_behind_everything(value):
    good = {n: [(1, 0.5)] for n in range(6)}
    states = dict.fromkeys(good, "complete")
    for strategy in (Asha(), Median()):
        verdict = strategy.decide(TableHistory(6, 1, good | {6: [(1, value)]}, states))
        assert verdict.kind == "stop" and verdict.reason
        bad = {n: [(1, value)] for n in range(6)}
        assert strategy.decide(TableHistory(6, 1, bad | {6: [(1, 0.5)]}, states)) == CONTINUE


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("ahsa", ["unknown strategy 'ahsa'", "did you mean 'asha'"]),
        ({}, ["unknown strategy None"]),
        ({"name": "asha", "eat": 3}, ["no option 'eat'", "did you mean 'eta'"]),
        ({"name": "asha", "eta": 1}, ["eta=1", "greater than or equal to 2"]),
        ({"name": "asha", "eta": "3"}, ["eta='3'", "integer"]),
        ({"name": "median", "interval": 0}, ["interval=0"]),
        ({"name": "none", "eta": 1}, ["it has none"]),
    ],
)
def test_wrong_specifications_are_refused_in_one_sentence(spec, words):
    with pytest.raises(UserError) as caught:
        make_strategy(spec)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


# --- Oracles


def optuna_decisions(pruner, full):
    """The same study under optuna's own pruner, trials one after another: (number, epoch) -> pruned?"""
    study = optuna.create_study(pruner=pruner)
    verdicts = {}
    for number, curve in full.items():
        trial = study.ask()
        for epoch, loss in curve:
            trial.report(loss, epoch)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of slices that are all NaN
                verdicts[number, epoch] = trial.should_prune()
            if verdicts[number, epoch]:
                study.tell(trial, state=TrialState.PRUNED)
                break
        else:
            study.tell(trial, 0.0)
    return verdicts


@pytest.mark.parametrize("every", [1, 2, 3])
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
def test_median_is_optunas_median_pruner(options, every):
    renamed = {
        {"n_warmup_epochs": "n_warmup_steps", "interval": "interval_steps"}.get(k, k): v for k, v in options.items()
    }
    stops = 0
    for seed in range(12):
        full = curves(seed, trials=20, every=every)
        expected = optuna_decisions(optuna.pruners.MedianPruner(**({"n_startup_trials": 5} | renamed)), full)
        verdicts, _, _ = simulate(Median(**options), full)
        decided = {key: key in verdicts and verdicts[key].kind == "stop" for key in expected}
        assert decided == expected
        stops += sum(expected.values())
    assert stops > 10, "the comparison has seen trials stop"


@pytest.mark.parametrize(("min_epochs", "eta"), [(1, 2), (1, 3), (2, 3), (1, 4)])
def test_asha_is_optunas_successive_halving_pruner(min_epochs, eta):
    """Where they mean the same: every epoch reported, values finite, so that each rung is met on its own epoch."""
    stops = 0
    for seed in range(12):
        full = curves(seed, trials=30, epochs=20, nan=0.0)
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=min_epochs, reduction_factor=eta)
        expected = optuna_decisions(pruner, full)
        verdicts, _, _ = simulate(Asha(min_epochs=min_epochs, eta=eta), full)
        assert {key: key in verdicts and verdicts[key].kind == "stop" for key in expected} == expected
        stops += sum(expected.values())
    assert stops > 100


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
    assert (Asha(eta=eta).decide(TableHistory(99, eta, tables)) == CONTINUE) == expected


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
