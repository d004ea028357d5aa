"""What `hpo confirm` says below its table."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
from scipy import stats

from hpo.analysis.follow_up.confirm import Confirmation, Confirmed, notes, undecided
from hpo.search.spread import MOST_SEEDS, Spread, seeds_needed

NO_LUCK = "no value differs between the seeds: the training does not use its seed, so luck is not measured"


def found(*values: list[float]) -> Confirmation:
    rows = [Confirmed(number, False, 0.5, Spread.of(seeds), None, 0) for number, seeds in enumerate(values)]
    return Confirmation("s", "s-confirm", "loss", None, rows, [0], None, None)


def test_seeds_that_change_nothing_are_said_to_measure_nothing():
    assert NO_LUCK in notes(found([0.25, 0.25], [0.5, 0.5 + 1e-16]), named=False)
    assert NO_LUCK not in notes(found([0.25, 0.25], [0.5, 0.51]), named=False)
    assert NO_LUCK not in notes(found([0.25], [0.5]), named=False), "one seed has no spread"


def ahead(differences: list[float]) -> Confirmation:
    one = found([0.5] * len(differences), [0.5] * len(differences))
    return Confirmation(one.study, one.name, one.metric, None, one.rows, [0], None, Spread.of(differences))


@pytest.mark.parametrize("differences", [[0.01, 0.02, 0.03], [0.01, 0.02, 0.09], [0.3, 0.1], [0.2, -0.1, 0.2, 0.1]])
def test_two_are_told_apart_where_students_interval_leaves_zero_out(differences):
    mean, error = fmean(differences), stdev(differences) / math.sqrt(len(differences))
    low, high = stats.t.interval(0.95, len(differences) - 1, mean, error)
    of = ahead(differences)
    assert of.ahead is not None and of.ahead.interval() == pytest.approx((low, high))
    assert (undecided(of) == "") == (low > 0)
    if low <= 0:
        assert f"the difference is {low:+.2g} to {high:+.2g}" in undecided(of)
        needed = seeds_needed(of.ahead)
        assert needed is not None and undecided(of) in notes(of, False)
        assert undecided(of).endswith(f"; `hpo confirm --study s --top 2 --seeds {needed}` may tell them apart")
        ends = [stats.t.interval(0.95, n - 1, mean, stdev(differences) / math.sqrt(n))[0] for n in (needed - 1, needed)]
        assert ends[0] <= 0 < ends[1]


def test_what_no_few_seeds_would_tell_apart_is_as_good_as_equal():
    of = ahead([0.1, -0.1, 0.0])
    assert undecided(of).endswith("; either will do") and seeds_needed(of.ahead) is None
    low = stats.t.interval(0.95, MOST_SEEDS - 1, 0.001, 0.1 / math.sqrt(MOST_SEEDS))[0]
    assert low < 0 and undecided(ahead([0.101, -0.099, 0.001])).endswith("; either will do")
    assert undecided(ahead([0.1])) == "", "one seed has no spread, which the first line says"
