"""What every strategy that promotes promises, in simulated time; and the published algorithm as the oracle."""

import heapq
import json
import math
import random
import sys
import types
from collections import Counter
from itertools import combinations
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds import rounds

from hpo.driver.request import request_of
from hpo.driver.resolve import declare
from hpo.errors import UserError
from hpo.search.curves import Group, Rankings
from hpo.search.pareto import beyond
from hpo.search.promotion import freeze_thaw
from hpo.search.promotion.base import PromotionStrategy, RungView
from hpo.search.promotion.hyperband import HyperbandPromote
from hpo.search.strategies.base import BaseStrategy
from hpo.search.strategies.hyperband import Hyperband
from hpo.search.strategies.registry import STRATEGIES, make_strategy
from hpo.search.strategies.table_history import TableHistory

SPECS = [
    {"name": "asha-promote"},
    {"name": "asha-promote", "min_epochs": 2, "eta": 2, "max_epochs": 9},
    {"name": "pasha"},
    {"name": "pasha", "eta": 2, "percentile": 50.0},
    {"name": "hyperband-promote"},
    {"name": "hyperband-promote", "eta": 2, "brackets": 2},
    {"name": "freeze-thaw"},
    {"name": "freeze-thaw", "min_epochs": 2, "eta": 2},
    {"name": "bohb"},
]
ASHA = SPECS[:2]


@pytest.fixture(params=SPECS, ids=json.dumps)
def strategy(request):
    return make_strategy(request.param)


def losses(seed: int, trials: int, epochs: int, nan: float = 0.05) -> dict[int, list[tuple[int, float]]]:
    """number -> (epoch, loss): falling, noisy, at times equal or not finite."""
    rng = random.Random(seed)
    full = {}
    for number in range(trials):
        level = rng.random()
        full[number] = [
            (epoch, math.nan if rng.random() < nan else round(level + rng.random() / epoch, 2))
            for epoch in range(1, epochs + 1)
        ]
    return full


def point(curve: list[tuple[int, float]]) -> tuple[float, float]:
    """The features of a configuration: one that says how it ends, and one that says nothing."""
    last = next((loss for _, loss in reversed(curve) if math.isfinite(loss)), 1.0)
    return min(last / 2, 1.0), random.Random(last).random()


class Simulation:
    """A study on tables, with so many workers and a clock of its own: what the driver and the workers do, in little.

    `jobs` are the trials in the order in which a worker took them up, each with the epoch it went on from; `modelled`
    counts the looks at the board at which freeze-thaw asked its model.
    """

    def __init__(self, strategy: PromotionStrategy, full: dict, workers: int = 1, seed: int = 0) -> None:
        self.spec, self.full, self.workers = strategy.model_dump(), full, workers
        self.rng = random.Random(seed)
        self.seen: dict[int, list] = {}
        self.states: dict[int, str] = {}
        self.verdicts: dict[tuple[int, int], str] = {}
        self.jobs: list[tuple[int, int]] = []
        self.most = self.modelled = 0
        self._events: list[tuple[float, int]] = []

    @property
    def strategy(self) -> PromotionStrategy:
        """A new one each time: it holds nothing."""
        made = make_strategy(json.loads(json.dumps(self.spec)))
        assert isinstance(made, PromotionStrategy)
        return made

    def run(self) -> "Simulation":
        now = 0.0
        while True:
            self._take_up(now)
            if not self._events:
                break
            now, number = heapq.heappop(self._events)
            self._report(number, now)
        for number, state in self.states.items():
            self.states[number] = "pruned" if state == "paused" else state
        return self

    def _take_up(self, now: float) -> None:
        while len(self._events) < self.workers:
            unasked = len(self.states) < len(self.full)
            shuffled = list(self.states)
            self.rng.shuffle(shuffled)
            seen = {n: self.seen[n] for n in shuffled if n in self.seen}
            board = RungView(seen, {n: self.states[n] for n in shuffled}, {n: point(self.full[n]) for n in shuffled})
            with patch.object(freeze_thaw, "improvement", wraps=freeze_thaw.improvement) as model:
                numbers = list(self.strategy.promote(board, last=not unasked))
            self.modelled += model.call_count
            assert all(self.states[number] == "paused" for number in numbers) and len(set(numbers)) == len(numbers)
            if not numbers and not unasked:
                return
            number = numbers[0] if numbers else len(self.states)
            self.jobs.append((number, len(self.seen.get(number, []))))
            self.states[number] = "running"
            self._events_push(now, number)
            self.most = max(self.most, len(self._events))

    def _events_push(self, now: float, number: int) -> None:
        heapq.heappush(self._events, (now + self.rng.uniform(0.5, 1.5), number))

    def _report(self, number: int, now: float) -> None:
        curve = self.full[number][: len(self.seen.get(number, [])) + 1]
        self.seen[number] = curve
        epoch, done = curve[-1][0], len(curve) == len(self.full[number])
        kind = "continue"
        if self.strategy.wants(epoch):
            kind = self.strategy.decide(TableHistory(number, epoch, self.seen, self.states)).kind
            self.verdicts[number, epoch] = kind
        if done:
            self.states[number] = "complete" if math.isfinite(curve[-1][1]) else "infeasible"
        elif kind == "continue":
            self._events_push(now, number)
        else:
            self.states[number] = {"stop": "pruned", "pause": "paused"}[kind]


def algorithm_2(full: dict, r: int, eta: int, R: int | None) -> list[tuple[int, int]]:
    """The jobs of one worker by Li et al. 2020, algorithm 2, written down as it stands there: (trial, epochs it has).

    A loss that is not finite is infinite. After the last configuration the best of each rung goes on as well.
    """
    length = len(next(iter(full.values())))
    levels = [level for k in range(30) if (level := r * eta**k) < min(length, R or length)]
    rungs: list[dict[int, float]] = [{} for _ in levels]
    promoted: list[set[int]] = [set() for _ in levels]
    jobs, asked = [], 0

    def get_job() -> tuple[int, int] | None:
        nonlocal asked
        for at_least in (0, 1) if asked == len(full) else (0,):
            for k in reversed(range(len(levels))):
                candidates = sorted(rungs[k], key=lambda t: (rungs[k][t], t))[: max(len(rungs[k]) // eta, at_least)]
                promotable = [t for t in candidates if t not in promoted[k] and math.isfinite(rungs[k][t])]
                if promotable:
                    promoted[k].add(promotable[0])
                    return promotable[0], k + 1
        if asked < len(full):
            asked += 1
            return asked - 1, 0
        return None

    while (job := get_job()) is not None:
        trial, k = job
        jobs.append((trial, levels[k - 1] if k else 0))
        if k < len(levels):
            loss = full[trial][levels[k] - 1][1]
            rungs[k][trial] = loss if math.isfinite(loss) else math.inf
    return jobs


@settings(max_examples=40)
@given(seed=st.integers(0, 2**16), spec=st.sampled_from(ASHA), epochs=st.sampled_from([5, 9, 12]))
def test_one_worker_does_what_the_published_algorithm_does(seed, spec, epochs):
    strategy = make_strategy(spec)
    full = losses(seed, trials=17, epochs=epochs)
    simulated = Simulation(strategy, full).run()
    assert _through(simulated, strategy) == algorithm_2(full, strategy.min_epochs, strategy.eta, strategy.max_epochs)


def _through(simulated: Simulation, strategy) -> list[tuple[int, int]]:
    """The jobs, with those at whose rung the trial went on without a pause spelled out."""
    jobs = []
    for number, at in simulated.jobs:
        jobs.append((number, at))
        for epoch in range(at + 1, len(simulated.full[number])):
            kind = simulated.verdicts.get((number, epoch))
            met = strategy.rung(epoch) is not None and strategy.rung(epoch) != strategy.rung(epoch - 1)
            if kind in ("pause", "stop"):
                break
            if met:
                jobs.append((number, epoch))
    return jobs


WITHOUT = [spec for spec in SPECS if spec["name"] != "freeze-thaw"]


@settings(max_examples=25)
@given(seed=st.integers(0, 2**16), spec=st.sampled_from(WITHOUT), workers=st.sampled_from([1, 2, 8]))
def test_whatever_the_workers_do(seed, spec, workers):
    assert assert_well_promoted(seed, spec, workers).modelled == 0


@rounds("workers", [1, 2, 8])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec not in WITHOUT], ids=json.dumps)
def test_whatever_the_workers_do_where_a_model_chooses(spec, workers):
    assert assert_well_promoted(workers, spec, workers).modelled > 0, "the rule of asha-promote alone chose"


def assert_well_promoted(seed: int, spec: dict, workers: int) -> Simulation:
    strategy = make_strategy(spec)
    full = losses(seed, trials=25, epochs=12, nan=0.02)
    simulated = Simulation(strategy, full, workers, seed).run()
    assert simulated.most <= workers
    assert sorted(simulated.states) == list(full)
    assert set(simulated.states.values()) <= {"complete", "pruned", "infeasible"}
    rungs = [
        (number, _asha(strategy, number).rung(epoch))
        for (number, epoch), kind in simulated.verdicts.items()
        if kind != "continue"
    ]
    assert len(set(rungs)) == len(rungs), "no trial is halted twice at one rung"
    starts: dict[int, list[int]] = {}
    for number, at in simulated.jobs:
        starts.setdefault(number, []).append(at)
    assert all(at == sorted(set(at)) and at[0] == 0 for at in starts.values()), "each goes on from where it paused"
    assert sum(map(len, simulated.seen.values())) < 0.7 * sum(map(len, full.values()))
    return simulated


def _asha(strategy, number: int):
    """What has the rungs of a trial."""
    return strategy.asha(strategy.bracket(number)) if isinstance(strategy, HyperbandPromote) else strategy


@given(seed=st.integers(0, 2**16), last=st.booleans())
def test_brackets_of_hyperband_are_studies_of_their_own(seed, last):
    strategy = make_strategy({"name": "hyperband-promote"})
    full = losses(seed, trials=40, epochs=9)
    simulation = Simulation(strategy, full)
    simulation.states = dict.fromkeys(full, "paused")
    simulation.seen = {n: curve[: 3 ** (n % 2) * 3 ** strategy.bracket(n)] for n, curve in full.items()}
    found = set(strategy.promote(RungView(simulation.seen, simulation.states), last))
    for bracket in range(3):
        alone = make_strategy({"name": "asha-promote", "min_epochs": 3**bracket})
        mine = {n: curve for n, curve in simulation.seen.items() if strategy.bracket(n) == bracket}
        assert {n for n in found if n in mine} == set(
            alone.promote(RungView(mine, dict.fromkeys(mine, "paused")), last)
        )


class Kept:
    """Trials that report in any order, and what the ledger keeps of them: the order of each span, as losses come."""

    def __init__(self, several: bool, seed: int) -> None:
        self.rng, self.several = random.Random(seed), several
        self.curves: dict[int, list] = {}
        self.states: dict[int, str] = {}
        self._rankings = Rankings(self.curves)

    def loss(self):
        value = self.rng.choice([0.1, 0.5, math.nan, math.inf, self.rng.random(), self.rng.random()])
        return beyond((value, self.rng.random()) if self.several else value, self.rng.choice([0.0, 0.0, 0.0, 1.0]))

    def report(self) -> TableHistory:
        """The next epoch of a trial that runs, or the first of another."""
        number = self.rng.choice([n for n, state in self.states.items() if state == "running"] + [len(self.states)])
        epoch = len(self.curves.get(number, [])) + 1
        self.curves[number] = [*self.curves.get(number, []), (epoch, self.loss())]
        self.states[number] = "running"
        self._rankings.put(number)
        return KeptHistory(self, number, epoch)

    def order(self, epoch: int, beyond: float, group: Group | None = None) -> list[int]:
        return self._rankings.of(epoch, beyond, group).order


class KeptHistory(TableHistory):
    def __init__(self, kept: Kept, number: int, epoch: int) -> None:
        super().__init__(number, epoch, kept.curves, kept.states)
        object.__setattr__(self, "order", kept.order)


@pytest.mark.parametrize("several", [False, True])
@rounds("seed", range(2))
def test_hyperband_decides_as_each_bracket_ranked_anew_by_itself(several, seed):
    """One strategy through all events on orders of all trials, against `asha-promote` on the bracket's trials alone."""
    one, kept = make_strategy({"name": "hyperband-promote", "eta": 2, "seed": seed}), Kept(several, seed)
    alone = [make_strategy({"name": "asha-promote", "min_epochs": 2**bracket, "eta": 2}) for bracket in range(3)]
    dealing, kinds, went_on = Hyperband(eta=2, seed=seed), set(), 0
    for _ in range(120):
        history = kept.report()
        number, epoch = history.number, history.epoch
        dealt = {n: dealing.bracket(n, dealing.brackets(4)) for n in kept.curves}
        mine = [{n: curve for n, curve in kept.curves.items() if dealt[n] == bracket} for bracket in range(3)]
        verdict = one.decide(history)
        own = TableHistory(number, epoch, mine[dealt[number]], kept.states)
        assert verdict == alone[dealt[number]].decide(own)
        kinds.add(verdict.kind)
        ended = "complete" if epoch == 9 else "running"
        kept.states[number] = {"pause": "paused", "stop": "pruned"}.get(verdict.kind, ended)
        for last in (True, False):
            boards = [RungView(curves, {n: kept.states[n] for n in curves}) for curves in mine]
            found = [n for bracket in range(3) for n in alone[bracket].promote(boards[bracket], last)]
            found.sort(key=lambda n: -len(kept.curves[n]))
            assert one.promote(RungView(kept.curves, kept.states, known=kept.order), last) == found
            assert one.promote(RungView(kept.curves, kept.states), last) == found
        if found and kept.rng.random() < 0.5:
            kept.states[found[0]], went_on = "running", went_on + 1
    assert kinds == {"continue", "pause", "stop"} and went_on > 5


def test_hyperband_computes_nothing_for_each_trial_at_a_decision():
    """Calls of Python functions, which no load of the machine changes, where 20 and 2000 trials have paused."""

    def calls(trials: int) -> int:
        strategy, kept = make_strategy("hyperband-promote"), Kept(False, 0)
        for number in range(trials):
            kept.curves[number] = [(epoch, -number + 0.1) for epoch in range(1, 3 ** strategy.bracket(number) + 1)]
        kept.states = dict.fromkeys(kept.curves, "paused")
        number = next(n for n in kept.curves if strategy.bracket(n) == 0)
        board, counted = RungView(kept.curves, dict.fromkeys(kept.curves, "running"), known=kept.order), Counter()

        def decide() -> None:
            strategy.promote(board, True)
            assert strategy.decide(KeptHistory(kept, number, 1)).kind == "pause"

        decide()
        sys.setprofile(lambda frame, event, given: counted.update([event]))
        try:
            decide()
        finally:
            sys.setprofile(None)
        return counted["call"]

    assert calls(2000) == calls(20)


def test_the_brackets_of_hyperband_have_the_shares_of_algorithm_1():
    """n = ceil((s_max + 1) eta^s / (s + 1)) for s = 2, 1, 0 and eta = 3."""
    strategy = make_strategy({"name": "hyperband-promote"})
    shares = [sum(strategy.bracket(n) == bracket for n in range(3400)) for bracket in range(3)]
    assert shares == pytest.approx([1800, 1000, 600], rel=0.1)


@rounds("trials", [1, 2, 25])
def test_a_study_ends_with_a_winner_trained_in_full(strategy, trials):
    full = losses(trials, trials, epochs=12, nan=0.0)
    simulated = Simulation(strategy, full, workers=2).run()
    assert "complete" in simulated.states.values()


@pytest.mark.parametrize("spec", ASHA, ids=json.dumps)
def test_a_better_one_that_waits_goes_first(spec):
    strategy = make_strategy(spec)
    rung = strategy.min_epochs
    curves = {n: [(rung, loss)] for n, loss in enumerate([0.1, 0.5, 0.6, 0.7, 0.8, 0.2, 0.9, 0.9, 0.9])}
    states = dict.fromkeys(curves, "paused") | {5: "running"}
    assert strategy.decide(TableHistory(5, rung, curves, states)).kind == "pause"
    assert list(strategy.promote(RungView(curves, states | {5: "paused"}), last=False))[:2] == [0, 5]
    assert strategy.decide(TableHistory(5, rung, curves, states | {0: "running"})).kind == "continue"


def _top(pasha, curves):
    return pasha.top(RungView(curves, {}).order, curves)


def test_the_highest_rung_of_pasha_rises_where_rankings_differ():
    pasha = make_strategy({"name": "pasha", "eta": 2})
    steady = {n: [(epoch, n + 1 / epoch) for epoch in range(1, 9)] for n in range(8)}
    assert _top(pasha, steady) == 1
    swapped = {n: [(epoch, float(n if epoch < 2 else -n)) for epoch in range(1, 9)] for n in range(8)}
    assert _top(pasha, swapped) == 2, "rungs 0 and 1 differ, 1 and 2 agree"
    assert _top(pasha, swapped | {8: [(1, math.nan)]}) == 2
    assert _top(pasha, {n: curve[:1] for n, curve in swapped.items()}) == 1
    simulated = Simulation(pasha, swapped).run()
    reached = sorted(len(curve) for curve in simulated.seen.values())
    assert reached[-1] == 8 and reached[-2] == 4, "beyond rung 2 the winner alone trains on"


def test_pashas_tolerance_is_a_percentile_of_trials_that_cross():
    pasha = make_strategy({"name": "pasha", "eta": 2, "percentile": 90.0})
    rng = random.Random(0)
    full = {n: [(epoch, rng.random()) for epoch in range(1, 10)] for n in range(6)}
    gaps = {
        pair: [a - b for (_, a), (_, b) in zip(full[pair[0]], full[pair[1]], strict=True)]
        for pair in combinations(full, 2)
    }
    twice = [abs(gap[-1]) for gap in gaps.values() if sum(np.diff(np.sign(gap)) != 0) >= 2]
    assert pasha._tolerance(list(full.values())) == pytest.approx(np.percentile(twice, 90.0), rel=1e-12)
    assert pasha._tolerance([full[n][:2] for n in full]) == 0.0


def test_the_highest_rung_of_pasha_is_that_of_the_papers_soft_ranking():
    """Section 4.2 by numpy: at each place, the trial there at rung K is within the tolerance, at rung K - 1, of the one
    that has the place there."""
    pasha = make_strategy({"name": "pasha", "eta": 2, "percentile": 50.0})
    rng, seen = np.random.default_rng(0), set()
    for case in range(200):
        length, noise = rng.integers(1, 17, 12), rng.choice([0.01, 0.3, 1.0])
        table = np.linspace(0, 1, 12)[:, None] + noise * rng.standard_normal((12, 16))
        table[rng.random((12, 16)) < 0.02] = np.nan
        curves = {n: [(e + 1, float(table[n, e])) for e in range(length[n])] for n in range(12)}
        expected = 1
        while True:
            above, below = 2**expected - 1, 2 ** (expected - 1) - 1
            both = [n for n in range(12) if length[n] > above and np.isfinite(table[n, [above, below]]).all()]
            if len(both) < 2:
                break
            tolerance = pasha._tolerance([curves[n] for n in both])
            order = [np.array(both)[np.argsort(table[both, column], kind="stable")] for column in (above, below)]
            if (abs(table[order[0], below] - table[order[1], below]) <= tolerance).all():
                break
            expected += 1
        assert _top(pasha, curves) == expected, case
        seen.add(expected)
    assert seen == {1, 2, 3, 4, 5}


def test_every_strategy_that_promotes_is_bound_here():
    found = {name for name in STRATEGIES if isinstance(make_strategy(name), PromotionStrategy)}
    assert found == {spec["name"] for spec in SPECS}


def test_bohb_brings_its_sampler(home):
    spec = declare(request_of(home, reference="mlp", strategy="bohb"), None, workers=2).spec
    assert (spec.sampler, spec.sampler_options) == ("bohb", {})
    assert declare(request_of(home, reference="mlp", strategy="bohb", sampler="bohb"), None, workers=2).spec == spec
    with pytest.raises(UserError, match=r"--sampler tpe: strategy bohb uses its own sampler; omit this option"):
        declare(request_of(home, reference="mlp", strategy="bohb", sampler="tpe"), None, workers=2)


def test_such_a_study_is_asynchronous(home):
    spec = declare(request_of(home, reference="mlp", strategy="asha-promote"), None, workers=3).spec
    assert (spec.order, spec.window) == ("async", 3)


def test_in_order_its_window_is_that_of_other_ordered_studies(home):
    spec = declare(request_of(home, reference="mlp", strategy="asha-promote", order="ordered"), None, workers=3).spec
    assert (spec.order, spec.window) == ("ordered", 6)


def test_a_strategy_of_ones_own_needs_wait_to_pause_in_order(home, monkeypatch):
    module = types.ModuleType("own_promotion")

    class Own(BaseStrategy):
        def wants(self, epoch): ...
        def decide(self, history): ...
        def promote(self, board, last): ...

    module.Own = Own  # type: ignore[attr-defined]
    Own.__module__ = "own_promotion"
    monkeypatch.setitem(sys.modules, "own_promotion", module)
    asked = {"reference": "mlp", "strategy": "own_promotion:Own"}
    assert declare(request_of(home, **asked), None, workers=1).spec.order == "async"
    with pytest.raises(
        UserError, match=r"--order ordered: strategy 'own_promotion:Own' has no wait\(history\), .* add it"
    ):
        declare(request_of(home, **asked, order="ordered"), None, workers=1)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**16), spec=st.sampled_from(SPECS))
def test_in_order_a_trial_pauses_at_each_rung_whatever_the_others_have(seed, spec):
    strategy = make_strategy(spec)
    own, others = losses(seed, 1, epochs=12)[0], losses(seed + 1, 5, epochs=12)
    for others_seen in ({}, {n + 1: curve for n, curve in others.items()}):
        for epoch in range(1, 12):
            curves = {**others_seen, 0: own[:epoch]}
            history = TableHistory(0, epoch, curves, dict.fromkeys(curves, "paused") | {0: "running"})
            kind = strategy.wait(history).kind if strategy.wants(epoch) else "continue"
            rungs = _asha(strategy, 0)
            met = strategy.wants(epoch) and rungs.rung(epoch) is not None and rungs.rung(epoch) != rungs.rung(epoch - 1)
            assert kind == (("stop" if math.isnan(own[epoch - 1][1]) else "pause") if met else "continue")


def test_a_strategy_that_brings_its_sampler_takes_no_other(home):
    spec = declare(request_of(home, reference="mlp", strategy="freeze-thaw"), None, workers=1).spec
    assert spec.sampler == "freeze-thaw" and spec.sampler_options == {}
    with pytest.raises(UserError, match="--sampler gp: strategy freeze-thaw uses its own sampler; omit this option"):
        declare(request_of(home, reference="mlp", strategy="freeze-thaw", sampler="gp"), None, workers=1)
