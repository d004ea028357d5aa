"""Holds the bench of forecasts: its rules by hand, and the bound on studies of its own."""

from __future__ import annotations

import pytest

from bench.forecast import MADE, Study, by_count, by_gain, by_patience, search
from bench.named import made
from bench.searchers import Ours
from hpo.search.forecast import HORIZON, Seen, forecast

LOSSES = [5.0, 3.0, 4.0, 6.0, None, 2.0, 7.0, 7.0, 7.0, 7.0, 7.0, 1.0]


def study(losses, unit=1.0) -> Study:
    return Study(
        kind="made",
        task="by hand",
        strategy="none",
        seed=0,
        unit=unit,
        epochs=[1] * len(losses),
        losses=losses,
        complete=[loss is not None for loss in losses],
        points=[],
    )


def test_rules_stop_where_they_do_by_hand():
    of = study(LOSSES)
    assert of.best.tolist() == [5, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 1]
    assert by_patience(3)(of) == 5, "trials 2, 3 and the one without a value follow the best one, trial 1"
    assert by_patience(4)(of) == 10
    assert by_patience(20)(of) == by_count(50)(of) == len(LOSSES)
    assert by_count(7)(of) == 7


def test_the_rule_of_a_gain_is_the_forecasts():
    losses = [1 / (number + 1) for number in range(60)]
    seen = [Seen(loss, complete=True) for loss in losses]
    gain = forecast(seen[:20], HORIZON).gain
    assert by_gain(1.001 * gain)(study(losses)) == 20
    assert by_gain(1.001 * gain / 2)(study(losses, unit=2.0)) == 20, "its threshold is a share of the unit"


@pytest.mark.slow
def test_the_bound_holds_for_nine_of_ten_studies_that_nobody_fitted_it_to():
    held, trials, more = 0, 40, 20
    for seed in range(10 * MADE, 11 * MADE):
        epochs, noise = (9, 18, 36)[seed % 3], (0.0, 0.1, 0.3)[seed // 3 % 3]
        ours = Ours("random", "none", 2, seed, 4, "last")
        of = Study(
            "made",
            "",
            "none",
            seed,
            1.0,
            **search(made(seed, epochs, noise, "last"), ours, epochs, trials + more, "last"),
        )
        expected = forecast(of.seen[:trials], more)
        assert expected is not None
        held += of.best[trials - 1] - of.best[-1] <= expected.most
    assert 0.82 <= held / MADE <= 0.98
