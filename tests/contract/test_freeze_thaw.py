"""Freeze-thaw in simulated time with the sampler that it brings, and its model against the algebra written down."""

import json
import math
import random

import numpy as np
import pytest
import torch
from rounds import rounds

from hpo import Choice, Float, Int, Objective
from hpo.search.promotion import curve_model
from hpo.search.promotion.base import RungView
from hpo.search.promotion.curve_model import Model, Trials, observe
from hpo.search.promotion.freeze_thaw import FreezeThaw
from hpo.search.samplers.base import TrialRecord
from hpo.search.samplers.registry import make_sampler
from hpo.search.strategies.registry import make_strategy
from hpo.search.strategies.table_history import TableHistory
from hpo.space.space import Space

SPACE = Space(
    {
        "lr": Float(1e-4, 1e-1, log=True),
        "kind": Choice(["a", "b"]),
        "size": Int(1, 64, log=True, when={"kind": "b"}),
    }
)
EPOCHS = 16


def curve(coordinates: dict) -> list[float]:
    """Falls by a power law to a level that is low around lr = 3e-3 and for kind b; kind a is ahead for two epochs."""
    off = abs(math.log10(coordinates["lr"]) + 2.5)
    level, fast = off + (0.5 if coordinates["kind"] == 0 else 0.0), 1.0 if coordinates["kind"] == 0 else 2.0
    if off > 1.4:
        return [math.nan] * EPOCHS
    return [level + fast / epoch for epoch in range(1, EPOCHS + 1)]


class Search:
    """One worker; everything that decides is made anew from JSON where `forget` says so."""

    def __init__(self, trials: int, seed: int = 0, forget: float = 0.0) -> None:
        self.trials, self.seed, self.rng, self.forget = trials, seed, random.Random(seed), forget
        self.records: dict[int, TrialRecord] = {}
        self.jobs: list[tuple[int, int]] = []
        self._anew()

    def _anew(self) -> None:
        self.strategy = make_strategy({"name": "freeze-thaw", "min_epochs": 1, "eta": 2})
        self.sampler = make_sampler("freeze-thaw", SPACE, [Objective("loss")], self.seed)
        known = list(self.records.values())
        self.rng.shuffle(known)
        for record in known:
            curve = [tuple(point) for point in json.loads(json.dumps(record.curve))]
            self.sampler.tell(TrialRecord(record.number, record.state, record.coordinates, record.values, curve))
        Model.of.cache_clear()

    def run(self) -> "Search":
        while (number := self._next()) is not None:
            self._train(number)
        return self

    def _next(self) -> int | None:
        if self.rng.random() < self.forget:
            self._anew()
        last = len(self.records) == self.trials
        board = RungView(
            {n: one.curve for n, one in self.records.items()},
            {n: one.state for n, one in self.records.items()},
            self.sampler.features(),
        )
        if found := self.strategy.promote(board, last):
            self.sampler.adopt(self.records[found[0]].open())
            return found[0]
        if last:
            return None
        number = len(self.records)
        coordinates = self.sampler.ask(number).coordinates
        self.records[number] = TrialRecord(number, "running", coordinates)
        return number

    def _train(self, number: int) -> None:
        record = self.records[number]
        full, seen = curve(record.coordinates), list(record.curve)
        self.jobs.append((number, len(seen)))
        kind = "continue"
        while kind == "continue" and len(seen) < EPOCHS:
            seen.append((len(seen) + 1, full[len(seen)]))
            if self.strategy.wants(len(seen)) and len(seen) < EPOCHS:
                tables = {n: one.curve for n, one in self.records.items()} | {number: seen}
                kind = self.strategy.decide(TableHistory(number, len(seen), tables)).kind
        state = {"continue": "complete", "pause": "paused", "stop": "pruned"}[kind]
        values = (seen[-1][1],) if state == "complete" else None
        self.records[number] = TrialRecord(number, state, record.coordinates, values, seen)
        self.sampler.tell(self.records[number])


@pytest.fixture(scope="module")
def golden() -> Search:
    return Search(40).run()


def test_it_learns_from_curves_and_configurations(golden):
    best = min((point for one in golden.records.values() for point in one.curve), key=lambda point: point[1])
    assert best == (EPOCHS, pytest.approx(2 / EPOCHS, abs=0.2)), "of kind b, which falls behind at first, near the best"
    late = [one.coordinates for one in golden.records.values() if one.number >= 20]
    assert sum(abs(math.log10(at["lr"]) + 2.5) < 0.5 for at in late) > 0.6 * len(late), "a third of them at random"
    trained = sum(len(one.curve) for one in golden.records.values())
    assert trained < 0.4 * EPOCHS * len(golden.records)
    assert len(set(golden.jobs)) == len(golden.jobs), "no rung is left twice"


def test_a_restart_at_any_event_changes_nothing(golden):
    again = Search(40, forget=0.2).run()
    assert again.jobs == golden.jobs
    assert {n: one.coordinates for n, one in again.records.items()} == {
        n: one.coordinates for n, one in golden.records.items()
    }


def test_another_seed_is_another_search(golden):
    assert Search(12, seed=1).run().records[3].coordinates != golden.records[3].coordinates


def test_as_many_go_on_as_under_asha_though_not_the_same():
    strategy = make_strategy({"name": "freeze-thaw", "min_epochs": 1, "eta": 2})
    points = {n: (n / 20, 0.5) for n in range(20)}
    curves = {n: [(1, abs(n - 12) / 20)] for n in range(20)}
    curves |= {12: [(1, 0.9)]}  # among the best, and out of luck
    states = dict.fromkeys(curves, "paused")
    assert len(strategy.promote(RungView(curves, states, points), last=False)) == 10
    gone = {11: "running", 13: "waiting", 10: "complete"}
    found = strategy.promote(RungView(curves, states | gone, points), last=False)
    assert len(found) == 7 and not set(found) & gone.keys()
    full = dict.fromkeys(list(curves)[5:15], "running")
    assert strategy.promote(RungView(curves, states | full, points), last=False) == []


@rounds("last", [False, True])
def test_where_nothing_finite_is_known_asha_promote_says_who_goes_on(last):
    """As of a loop of the user's own that pauses at its own will: there is nothing to make a model of."""
    points, curves = {n: (n / 20, 0.5) for n in range(20)}, {n: [(1, math.nan)] for n in range(20)}
    states = dict.fromkeys(curves, "paused") | {3: "failed", 4: "running"}
    curves |= {3: [(1, 0.5)], 4: [(1, 0.4)]}  # of these the model takes nothing
    board = RungView(curves, states, points)
    found, expected = (
        make_strategy({"name": name, "min_epochs": 1, "eta": 2}).promote(board, last)
        for name in ("freeze-thaw", "asha-promote")
    )
    assert found == expected and len(found) == 8


def test_what_still_trains_is_seen_where_it_came_to_a_mark():
    """So that its next epoch alone makes no other model; nothing of it is the worst of all."""
    points = {n: (n / 4,) for n in range(4)}
    curves = {n: [(epoch, n + 1 / epoch) for epoch in range(1, last + 1)] for n, last in enumerate((5, 6, 3, 13))}
    curves[2][-1] = (3, 1e9)
    numbers, trials = observe(points, curves, growing={1, 2, 3})
    assert numbers == [0, 1, 3] and [[epoch for epoch, _ in seen] for seen in trials.seen] == [[4, 5], [4], [4, 12]]
    curves[1].append((7, 0.0))
    assert observe(points, curves, growing={1, 2, 3})[1] == trials
    assert observe(points, curves, growing={2, 3})[1] != trials
    assert observe(points, curves, growing=set(points)) == ([], Trials((), ()))


def test_a_trial_that_goes_on_keeps_what_its_curve_has_said(golden):
    """Also of a sampler that has never seen it pause."""
    told = [one for one in golden.records.values() if one.number < 25]
    longest = max(told, key=lambda one: (len(one.curve), -one.number)).number
    live, rebuilt = (make_sampler("freeze-thaw", SPACE, [Objective("loss")], 0) for _ in range(2))
    for record in told:
        live.tell(record)
        thawed = record.number == longest
        if thawed:
            live.adopt(record.open())
        (rebuilt.adopt if thawed else rebuilt.tell)(record.open() if thawed else record)
    without = make_sampler("freeze-thaw", SPACE, [Objective("loss")], 0)
    for record in told:
        without.tell(record if record.number != longest else TrialRecord(longest, "running", record.coordinates))
    first = live.ask(25)
    assert first == rebuilt.ask(25) != without.ask(25)


def test_the_posterior_is_that_of_the_kernel_written_down():
    """Against numpy's inverse: mean and variance of a new trial, expected improvement by its closed form."""
    rng = np.random.default_rng(0)
    points = {n: tuple(rng.random(2)) for n in range(9)}
    curves = {n: [(e, float(points[n][0] + 1 / e)) for e in range(1, 16)] for n in range(9)}
    numbers, trials = observe(points, curves)
    assert numbers == list(range(9)) and [epoch for epoch, _ in trials.seen[0]] == [4, 12, 15]
    model = Model(trials)
    f, g, of_f, of_g, c, noise, *scales = model._theta.exp().tolist()

    def kernel(one, other):
        r = math.sqrt(5 * sum(((a - b) / s) ** 2 for a, b, s in zip(one[0], other[0], scales, strict=True)))
        alike, own = (1 + r + r * r / 3) * math.exp(-r), one[2] == other[2]
        left = (one[1] * other[1]) ** -c
        return 1.0 + f * f * alike + g * g * own + left * (1.0 + of_f**2 * alike + of_g**2 * own)

    seen = [(points[n], e, n) for n in range(9) for e, _ in trials.seen[n]]
    warp = curve_model._Warp(trials)
    y = np.array([warp(loss) for one in trials.seen for _, loss in one])
    gram = np.array([[kernel(a, b) for b in seen] for a in seen]) + (noise**2 + 1e-6) * np.eye(len(seen))
    inverse = np.linalg.inv(gram)
    means = [np.array([kernel((points[n], 24, n), b) for b in seen]) @ inverse @ y for n in range(9)]
    leader = min(*means, min(y))
    for point, place in (((0.3, 0.4), -1), (points[4], 4)):
        cross = np.array([kernel((point, 24, place), b) for b in seen])
        mean, variance = cross @ inverse @ y, kernel((point, 24, place), (point, 24, place))
        spread = math.sqrt(variance - cross @ inverse @ cross)
        z = (leader - mean) / spread
        expected = spread * (z * 0.5 * math.erfc(-z / math.sqrt(2)) + math.exp(-z * z / 2) / math.sqrt(2 * math.pi))
        assert model.improvement([point], [place], 24) == [pytest.approx(expected, rel=1e-5)]


def test_the_gradient_of_the_fit_is_that_of_the_marginal_likelihood():
    rng = np.random.default_rng(1)
    points, curves = {n: tuple(rng.random(2)) for n in range(9)}, {n: [(4, n / 9), (12, n / 12)] for n in range(9)}
    _, trials = observe(points, curves)
    table = curve_model._table(trials, curve_model._Warp(trials), curve_model._all(trials))
    theta = torch.linspace(-1.0, 0.0, 8, dtype=torch.float64).requires_grad_()
    kernel = curve_model._kernel(theta, table, table, same=True)
    marginal = 0.5 * (table.y @ torch.linalg.solve(kernel, table.y) + torch.logdet(kernel))
    (expected,) = torch.autograd.grad(marginal, theta)
    _, found = curve_model._loss(theta, table, theta)
    assert torch.allclose(found, expected, rtol=1e-9)


def test_a_model_depends_on_nothing_but_its_trials():
    points = tuple((n / 12, (n * 5 % 12) / 12) for n in range(12))
    seen = tuple(((1, 1.0 + n / 3), (2, 0.5 + n / 3)) for n in range(12))
    before = torch.get_num_threads()
    first = Model(Trials(points, seen)).improvement(points, range(12), 4)
    curve_model._fitted.cache_clear()
    assert Model(Trials(points, seen)).improvement(points, range(12), 4) == first
    halved = tuple(tuple((epoch, loss / 2) for epoch, loss in one) for one in seen)
    assert Model(Trials(points, halved)).improvement(points, range(12), 4) == pytest.approx(first)
    assert torch.get_num_threads() == before


@rounds("losses", [[1.0] * 10, [math.nan] * 9 + [1.0], [1e300, -1e300] * 5])
def test_flat_broken_and_vast_losses(losses):
    points = {n: (n / 10,) for n in range(10)}
    numbers, trials = observe(points, {n: [(1, loss)] for n, loss in enumerate(losses)})
    found = Model(trials).improvement([points[n] for n in numbers], range(len(numbers)), 2)
    assert all(math.isfinite(value) and value >= 0 for value in found)


def test_of_thousands_of_trials_the_best_are_taken_in():
    points = tuple((n / 2000,) for n in range(2000))
    seen = tuple(((1, abs(n - 700) / 100),) for n in range(2000))
    model = Model(Trials(points, seen))
    assert len(model._table.y) == curve_model.MOST
    worth = model.improvement(points, range(2000), 2)
    assert abs(max(range(2000), key=worth.__getitem__) - 700) < 100


def test_the_room_at_a_rung_is_the_quota_less_those_that_have_gone_on():
    """By the definition, of the trials one by one; and an epoch at which many stand is looked at once."""
    rng = random.Random(0)
    looked: list[int] = []

    class Counting(FreezeThaw):
        def rung(self, epoch: int) -> int | None:
            looked.append(epoch)
            return super().rung(epoch)

    for _ in range(50):
        strategy = Counting(min_epochs=rng.randint(1, 5), eta=rng.randint(2, 4), max_epochs=rng.choice([None, 9, 20]))
        curves = {n: [(epoch, 0.0) for epoch in range(1, rng.randint(1, 41))] for n in range(200)}
        states = {n: rng.choice(["paused", "running", "waiting", "complete", "pruned", "failed"]) for n in curves}
        rungs = {n: strategy.rung(curve[-1][0]) for n, curve in curves.items() if curve}
        reached = {n: -1 if rung is None else rung for n, rung in rungs.items()}
        expected = {}
        for rung in range(max(reached.values()) + 1):
            come = [n for n, at in reached.items() if at >= rung]
            gone = [n for n in come if reached[n] > rung or states[n] in ("waiting", "running", "complete")]
            expected[rung] = len(come) // strategy.eta - len(gone)
        assert strategy._room(RungView(curves, states)) == expected
    looked.clear()
    many = {n: [(4, 0.0)] for n in range(1000)}
    assert Counting()._room(RungView(many, dict.fromkeys(many, "paused"))) == {0: 333} and len(looked) < 10


@pytest.mark.parametrize("space", [{"lr": Float(1e-4, 1e-1, log=True), "width": Int(4, 64)}, dict(SPACE.dimensions)])
def test_no_configuration_is_proposed_twice(space):
    """The best ones stand among the places that it chooses from, and where values are exact nothing seems better."""
    sampler = make_sampler("freeze-thaw", Space(space), [Objective("loss")], 0)
    asked = []
    for number in range(90):
        coordinates = sampler.ask(number).coordinates
        asked.append(json.dumps(Space(space).decode(coordinates), sort_keys=True))
        loss = abs(math.log10(coordinates["lr"]) + 2.7) + coordinates.get("kind", 0)
        sampler.tell(TrialRecord(number, "complete", coordinates, (loss,), [(epoch, loss) for epoch in range(1, 10)]))
    assert len(set(asked)) == len(asked)
