"""Averaging weights: the mean against float64 by hand, the greedy recipe against trying it out."""

from __future__ import annotations

import pytest
import torch

from trainer.model import soup


def weights(*values: float):
    return {"w": torch.tensor(values), "steps": torch.tensor(3), "half": torch.tensor(values, dtype=torch.bfloat16)}


def test_the_mean_is_that_of_float64_and_counters_are_the_firsts():
    many = [{"w": torch.full((1,), 1e8)}, {"w": torch.full((1,), 1.0)}, {"w": torch.full((1,), -1e8)}]
    assert soup.mean(many)["w"].item() == pytest.approx(1 / 3)  # summed in float32 the 1 is lost
    mixed = soup.mean([weights(1.0, 2.0), weights(3.0, 6.0) | {"steps": torch.tensor(9)}])
    assert mixed["w"].tolist() == [2.0, 4.0]
    assert mixed["steps"].item() == 3 and mixed["steps"].dtype == torch.int64
    assert mixed["half"].dtype == torch.bfloat16 and mixed["half"].tolist() == [2.0, 4.0]


def test_the_greedy_soup_takes_what_does_no_harm():
    members = [weights(v) for v in (1.0, -5.0, 3.0, 3.0, 100.0)]
    target = 2.0  # with 0: 1; -5 would make -2; 3 makes 2; another 3 makes 2.33; 100 never helps

    def score(mean):
        return [-abs(mean["w"].item() - target)]

    assert soup.greedy(members, score) == [0, 2]


def test_what_is_not_a_number_is_never_added():
    assert soup.greedy([weights(1.0), weights(float("nan"))], lambda mean: [mean["w"].item()]) == [0]


@pytest.mark.parametrize(
    "other", [{"w": torch.zeros(3)}, {"v": torch.zeros(2)}, {"w": torch.zeros(2, dtype=torch.float64)}, {}]
)
def test_architectures_are_told_apart(other):
    assert soup.same_architecture({"w": torch.zeros(2)}, {"w": torch.ones(2)})
    assert not soup.same_architecture({"w": torch.zeros(2)}, other)
