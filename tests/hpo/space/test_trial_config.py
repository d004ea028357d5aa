"""How a trial is trained, as its configuration says."""

from __future__ import annotations

import math

import pytest

from hpo.space.trial_config import TrialShape


@pytest.mark.parametrize(
    ("train", "changes", "epochs"),
    [
        ({"num_epochs": 7}, {}, 7),
        ({"num_epochs": 7}, {"train.num_epochs": 9}, 9),
        ({"num_epochs": 7, "folds": 3}, {}, 3),
        ({"num_epochs": None}, {}, math.inf),
        (3, {}, math.inf),
        (None, {}, math.inf),
    ],
)
def test_the_epochs_of_a_trial_that_does_not_say_are_not_known(train, changes, epochs):
    assert TrialShape.of({} if train is None else {"train": train}, changes).epochs == epochs


def test_a_configuration_that_says_nothing_is_one_model_in_one_process():
    for config in ({}, {"train": 3}, {"train": {}}):
        shape = TrialShape.of(config)
        assert (shape.folds, shape.lanes, shape.ranks) == (1, 1, 1)
    shape = TrialShape.of({"train": {"folds": 3, "lanes": 4, "parallel": {"data": 2}}})
    assert (shape.folds, shape.lanes, shape.ranks) == (3, 4, 2)
