"""Which of several losses are best, against the definitions written down as they stand."""

import math
import random
import sys
from collections import Counter

import pytest
from rounds import rounds

from hpo.errors import StudyError
from hpo.search.curves import Rankings
from hpo.search.pareto import Ranking, ahead, beyond, dominates, front, fronts, ranked, spread
from hpo.search.ranking import best_of, placed
from hpo.search.strategies.asha import Asha
from hpo.search.strategies.halving import Halving
from hpo.search.strategies.hyperband import Hyperband
from hpo.search.strategies.table_history import TableHistory
from hpo.space.objective import Constraint


def brute_fronts(losses):
    """Peel what nothing left dominates, by comparing every pair."""
    left, found = dict(losses), []
    while left:
        first = [
            key
            for key in sorted(left)
            if not any(
                all(a <= b for a, b in zip(left[other], left[key], strict=True))
                and any(a < b for a, b in zip(left[other], left[key], strict=True))
                for other in left
            )
        ]
        found.append(first)
        for key in first:
            del left[key]
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_fronts_are_those_of_every_pair_compared(size):
    for seed in range(40):
        rng = random.Random(seed)
        grid = [0.0, 0.5, 1.0, 2.0, math.inf] if seed % 2 else [rng.random() for _ in range(30)]
        losses = {key: tuple(rng.choice(grid) for _ in range(size)) for key in range(rng.randint(0, 40))}
        found = brute_fronts(losses)
        assert fronts(losses) == found, f"seed {seed}"
        assert front(losses) == (found[0] if found else []), f"seed {seed}"
        order = ranked(losses)
        place = {key: i for i, one in enumerate(found) for key in one}
        assert [place[key] for key in order] == sorted(place.values()), f"seed {seed}: a front before the next"
        dominated = [b for i, a in enumerate(order) for b in order[i:] if dominates(losses[b], losses[a])]
        assert not dominated, f"seed {seed}"


def violated(loss):
    return getattr(loss, "violation", 0.0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_constraint_breakers_rank_behind_the_feasible_by_how_much(size):
    for seed in range(20):
        assert_feasible_first(size, random.Random(seed), f"seed {seed}")


def assert_feasible_first(size, rng, where):
    """Deb et al. 2002, definition: feasible before infeasible, of these the less violation, else domination."""
    losses = {
        key: beyond(tuple(rng.random() for _ in range(size)), rng.choice([0.0, 0.0, 0.1, 0.1, 2.0, math.inf]))
        for key in range(30)
    }
    if size == 1:
        losses = {key: beyond(loss[0], violated(loss)) for key, loss in losses.items()}
        expected = sorted(losses, key=lambda key: (violated(losses[key]), float(losses[key]), key))
        assert ranked(losses) == expected, where
        assert min(losses, key=lambda key: losses[key]) == expected[0], where
        place = {key: i for i, key in enumerate(expected)}
        assert all((losses[a] < losses[b]) == (place[a] < place[b]) for a in losses for b in losses), where
        return
    order = []
    for group in sorted({violated(loss) for loss in losses.values()}):
        order += ranked({key: tuple(loss) for key, loss in losses.items() if violated(loss) == group})
    assert ranked(losses) == order, where
    for a in losses:
        for b in losses:
            if violated(losses[a]) != violated(losses[b]):
                assert dominates(losses[a], losses[b]) == (violated(losses[a]) < violated(losses[b])), where


@pytest.mark.parametrize("several", [False, True])
def test_a_ranking_that_is_kept_is_the_one_made_anew(several):
    for seed in range(10):
        assert_kept_as_made_anew(several, random.Random(seed), f"seed {seed}")


def assert_kept_as_made_anew(several, rng, where):
    def loss():
        value = rng.choice([0.0, 0.5, 1.0, math.nan, math.inf, rng.random()])
        return beyond((value, rng.random()) if several else value, rng.choice([0.0, 0.0, 1.0]))

    losses = {key: loss() for key in rng.sample(range(50), rng.choice([0, 12]))}
    ranking = Ranking(losses)
    for _ in range(150):
        number, new = rng.randrange(50), rng.choice([None, loss(), loss()])
        ranking.put(number, new)
        losses.pop(number, None)
        losses |= {} if new is None else {number: new}
        assert ranking.order == ranked(losses) and ranking.losses.keys() == losses.keys(), where


def test_one_loss_ranks_as_it_did_and_nan_is_behind_everything():
    losses = {0: 0.3, 1: math.nan, 2: 0.1, 3: 0.3, 4: math.inf}
    assert ranked(losses) == [2, 0, 3, 4, 1]
    assert ranked({key: (loss,) for key, loss in losses.items()}) == [2, 0, 3, 4, 1]
    assert ranked({0: (1.0, math.nan), 1: (9.0, 9.0), 2: (0.0, 9.5)}) == [2, 1, 0]


def test_a_front_is_ordered_so_that_its_first_trials_cover_it():
    line = {key: (key / 10, 1 - key / 10) for key in range(11)}
    assert list(spread(line))[:3] == [0, 10, 5], "an end, the other end, the middle"
    shuffled = {key: line[key] for key in random.Random(0).sample(range(11), 11)}
    assert list(spread(shuffled)) == list(spread(line))
    stretched = {key: (1000 * a, b) for key, (a, b) in line.items()}
    assert list(spread(stretched)) == list(spread(line)), "in whatever unit"
    assert list(spread({3: (1.0, 2.0), 1: (1.0, 2.0)})) == [1, 3]
    assert sorted(spread({0: (0.0, math.inf), 1: (1.0, 0.0), 2: (0.5, 1.0)})) == [0, 1, 2]


def brute_spread(losses):
    """Always the farthest of those left from the nearest of those taken; the lowest key of equals."""
    low, high = (tuple(map(edge, zip(*losses.values(), strict=True))) for edge in (min, max))
    points = {
        key: tuple((x - a) / ((b - a) or 1.0) for x, a, b in zip(loss, low, high, strict=True))
        for key, loss in losses.items()
    }
    order = [min(losses, key=lambda key: (losses[key], key))]
    while left := sorted(losses.keys() - order):
        order.append(max(left, key=lambda key: (min(math.dist(points[key], points[o]) for o in order), -key)))
    return order


@pytest.mark.parametrize("size", [2, 3])
def test_how_many_are_ahead_is_counted_in_the_order_of_all(size):
    for seed in range(15):
        rng = random.Random(seed)
        grid = [0.0, 0.5, 1.0, 2.0] if seed % 2 else [rng.random() for _ in range(30)]
        sound = {key: tuple(rng.choice(grid) for _ in range(size)) for key in rng.sample(range(40), 25)}
        order = [key for one in brute_fronts(sound) for key in brute_spread({key: sound[key] for key in one})]
        losses = {90: (math.nan,) * size, **sound, 91: (0.0, math.nan, 0.0)[:size]}
        assert ranked(losses) == [*order, 90, 91], f"seed {seed}"
        for place, number in enumerate(order):
            before = sum(losses[other] != losses[number] for other in order[:place])
            assert ahead(losses, number) == before, f"seed {seed}, trial {number}"


@pytest.mark.parametrize(
    "strategy", [Asha(min_epochs=1), Halving(min_epochs=1), Hyperband(max_epochs=2)], ids=lambda one: one.name
)
def test_a_rung_orders_the_front_of_its_trial_alone(strategy):
    """In the transaction of its report: of n on a front that takes n^2 / 2 distances."""
    rng = random.Random(0)
    losses, counted = {number: (rng.random(), rng.random()) for number in range(300)}, Counter()
    own = next(one for one in fronts(losses)[9])
    history = TableHistory(own, 1, {number: [(1, loss)] for number, loss in losses.items()}, dict.fromkeys(losses, "x"))
    most = len(fronts(losses)[9])

    def count(frame, event, called):
        counted.update([called] if event == "c_call" else [])

    sys.setprofile(count)
    try:
        assert strategy.decide(history).kind == "stop"
    finally:
        sys.setprofile(None)
    assert counted[math.dist] <= most * (most - 1) // 2


OBJECTIVES = [{"metric": "loss", "direction": "minimize"}, {"metric": "accuracy", "direction": "maximize"}]


def test_the_best_trials_are_the_front_by_their_own_directions():
    values = {0: (0.5, 0.5), 1: (0.4, 0.6), 2: (0.1, 0.1), 3: (0.4, 0.6), 4: (0.9, 0.9)}
    assert best_of(OBJECTIVES, values) == [2, 1, 3, 4]
    assert placed(OBJECTIVES, values) == {2: (0, 0), 1: (0, 1), 3: (0, 2), 4: (0, 3), 0: (1, 4)}
    one = {number: value[:1] for number, value in values.items()}
    assert best_of(OBJECTIVES[:1], one) == [2]
    assert placed(OBJECTIVES[:1], one) == {2: (0, 0), 1: (0, 1), 3: (0, 2), 0: (0, 3), 4: (0, 4)}
    assert best_of(OBJECTIVES, {}) == [] and placed(OBJECTIVES, {}) == {}


def test_a_violation_is_a_share_of_the_bound():
    for bounds, value, violation in [
        ({"upper": 200.0}, 300.0, 0.5),
        ({"upper": 200.0}, 200.0, 0.0),
        ({"upper": 200.0}, 100.0, -0.5),
        ({"lower": -2.0}, -3.0, 0.5),
        ({"upper": 0.0}, 0.25, 0.25),
        ({"lower": 1.0, "upper": 4.0}, 0.5, 0.5),
        ({"lower": 1.0, "upper": 4.0}, 3.0, -0.25),
    ]:
        assert Constraint("m", **bounds).violation(value) == pytest.approx(violation), f"{value} within {bounds}"


@rounds(
    ("given", "words"),
    [
        ({"metric": ""}, "must be the name of a metric"),
        ({"metric": "m"}, "has no bound"),
        ({"metric": "m", "upper": math.nan}, "upper=nan must be a finite number"),
        ({"metric": "m", "lower": True}, "lower=True must be a finite number"),
        ({"metric": "m", "lower": 2, "upper": 1}, "lower=2 is above upper=1"),
    ],
)
def test_a_constraint_that_bounds_nothing_is_refused(given, words):
    with pytest.raises(StudyError, match=words):
        Constraint(**given)


def test_of_many_rankings_those_asked_for_last_are_kept(monkeypatch):
    monkeypatch.setattr("hpo.search.curves._KEPT", 3)
    kept = Rankings({0: [(1, 0.5)]})
    often = kept.of(1, 2)
    for epoch in range(2, 8):
        kept.of(epoch, epoch + 1)
        assert kept.of(1, 2) is often
    seldom = kept.of(7, 8)
    for epoch in range(8, 11):
        kept.of(epoch, epoch + 1)
    assert kept.of(7, 8) is not seldom
