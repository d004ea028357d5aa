"""Phases of a loss's weights, and that a task can follow them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trainer.config import LossWeights, Phase

TWO = (Phase(weights={"mse": 1.0}), Phase(start=0.5, weights={"mse": 0.4, "rank_ic": 0.6}))


def test_phases_follow_each_other():
    weights = LossWeights(phases=TWO, scale={"rank_ic": 0.5})
    assert weights.at(0.0) == weights.at(0.499) == {"mse": 1.0}
    assert weights.at(0.5) == weights.at(1.0) == {"mse": 0.4, "rank_ic": 0.3}


def test_a_blend_moves_linearly_to_the_new_weights():
    weights = LossWeights(phases=TWO, blend=0.2)
    assert weights.at(0.5) == {"mse": 1.0}
    assert weights.at(0.6) == pytest.approx({"mse": 0.7, "rank_ic": 0.3})
    assert weights.at(0.701) == weights.at(0.9) == {"mse": 0.4, "rank_ic": 0.6}


@given(progress=st.floats(0, 1), h=st.floats(1e-6, 0.01), blend=st.floats(0.05, 0.5))
def test_blended_weights_have_no_jump(progress, h, blend):
    weights = LossWeights(phases=TWO, blend=blend)
    before, after = weights.at(progress), weights.at(min(progress + h, 1.0))
    for term in weights.terms:
        assert abs(before.get(term, 0.0) - after.get(term, 0.0)) <= h / blend + 1e-9


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"phases": ()}, "let the first start at 0"),
        ({"phases": TWO[1:]}, "let the first start at 0"),
        ({"phases": (TWO[0], TWO[0])}, "each later than the one before"),
        ({"phases": TWO, "blend": 0.6}, "blend 0.6 is longer than a phase"),
        ({"phases": TWO, "scale": {"sharp": 1.0}}, "scale of 'sharp', which no phase weighs: give one of mse, rank_ic"),
        ({"phases": TWO, "scale": {"mse": 0.0}}, "phase from 0.0 on has no term with a weight above 0"),
    ],
)
def test_mistakes_are_refused(given, message):
    with pytest.raises(ValidationError, match=message):
        LossWeights(**given)


def test_factors_are_found_by_their_path_in_a_space():
    from hpo.space.config import apply
    from hpo.space.config_check import check
    from hpo.space.space import Float, Space
    from trainer.config import Frozen

    class Config(Frozen):
        loss: LossWeights = LossWeights(phases=TWO)

    check(Space({"loss.scale.rank_ic": Float(0.1, 3.0, log=True)}), Config())
    assert apply(Config(), {"loss.scale.rank_ic": 2.0}).loss.at(1.0) == {"mse": 0.4, "rank_ic": 1.2}
