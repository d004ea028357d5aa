"""What a group of lanes claims, in which order, and what of a claim, a decision or a declaration is one trial's."""

from __future__ import annotations

from typing import Any

import pytest
from lane_studies import ALIKE, FLAGS, SIZES, STEPS, groups, outcomes, values, variant
from sqlalchemy import select
from study_runs import drive, query

from hpo.ledger.database.tables import trials
from hpo.search.strategies.base import BaseStrategy, History
from hpo.search.strategies.registry import STRATEGIES
from hpo.storage.home import Home
from trainer.report import CONTINUE, Verdict

pytestmark = pytest.mark.whole

ASHA = '{"name": "asha", "min_epochs": 1, "eta": 2}'
PATIENT = f'{{"name": "patient", "patience": 0, "strategy": {ASHA}}}'


@pytest.mark.parametrize("strategy", ["patient", "median"])
def test_no_group_passes_over_a_waiting_trial_under_any_strategy(tmp_path, strategy):
    """Also under one that has no rungs by itself: another that it asks may have them. No attempt gives way."""
    home = Home(tmp_path / "home")
    flags = FLAGS | {"reference": variant(tmp_path, ASHA, PATIENT), "strategy": strategy}
    entries = [{"model.hidden_size": size} for size in SIZES]
    _, _, state, _ = drive(home, trials=len(SIZES), enqueue=entries, **flags)
    assert state == "complete" and sorted(groups(home).values()) == [[0, 1], [2], [3, 4]]
    assert [(number, fence) for number, fence, _ in outcomes(home)] == [(number, 1) for number in range(len(SIZES))]


class RaisesForOne(BaseStrategy):
    """It has a bug that trial 1 meets at epoch 2."""

    name: str = "raising"

    def wants(self, epoch: int) -> bool:
        return True

    def decide(self, history: History) -> Verdict:
        if (history.number, history.epoch) == (1, 2):
            raise ValueError("of one trial")
        return CONTINUE


def test_a_decision_that_raises_fails_its_lane_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(STRATEGIES, "raising", f"{__name__}:RaisesForOne")
    found: dict[str, Home] = {}
    for strategy in ("none", "raising"):
        found[strategy] = home = Home(tmp_path / strategy)
        _, _, state, _ = drive(home, trials=4, strategy=strategy, sampler="random", **FLAGS | ALIKE)
        assert state == "complete" and list(groups(home).values()) == [[0, 1, 2, 3]]
    assert outcomes(home) == [(n, 1, "user_error" if n == 1 else "complete") for n in range(4)]
    [(error,)] = query(home, select(trials.c.error).where(trials.c.number == 1))
    assert "ValueError: of one trial" in error
    expected = values(found["none"])
    expected[1] = [one for one in expected[1] if one[1] <= STEPS]  # (key, step, value)
    assert values(home) == expected


def test_a_field_of_lanes_that_is_none_of_the_configurations_is_named(tmp_path):
    reference = variant(tmp_path, 'lane_fields = ("model.dropout",)', 'lane_fields = ("model.dropuot",)')
    home = Home(tmp_path / "home")
    flags: dict[str, Any] = FLAGS | ALIKE | {"reference": reference, "strategy": "none", "sampler": "random"}
    drive(home, trials=2, **flags)
    assert outcomes(home) == [(0, 1, "bad_config"), (1, 1, "bad_config")]
    [(error,)] = query(home, select(trials.c.error).distinct())
    assert error == (
        "lane_fields of LanesTask: unknown path 'model.dropuot': model has no field 'dropuot'; did you mean "
        "'model.dropout'?"
    )
