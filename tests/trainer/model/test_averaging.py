"""Averages of weights against their closed forms in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trainer.config import AverageConfig
from trainer.model.averaging import Average


def wander(model: nn.Module, average: Average, steps: int, first: int = 0) -> list[torch.Tensor]:
    """Random weights for `steps` steps, each taken into the average; the weights, in float64."""
    seen = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        average.update(step + 1)
        seen.append(model.weight.detach().double().clone())
    return seen


def test_ema_is_the_recursion_with_its_warm_up():
    model = nn.Linear(3, 2)
    average = Average(AverageConfig(name="ema", decay=0.9), model, total=40)
    seen = wander(model, average, 40)
    expected = seen[0]
    for n, weights in enumerate(seen[1:], start=1):
        decay = min(0.9, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * weights
    torch.testing.assert_close(average.model.weight.double(), expected, rtol=1e-5, atol=1e-6)


def test_swa_is_the_mean_of_the_weights_after_its_start():
    model = nn.Linear(3, 2)
    average = Average(AverageConfig(name="swa", start=0.5, every_steps=5), model, total=40)
    seen = wander(model, average, 40)
    expected = torch.stack([seen[step - 1] for step in (25, 30, 35, 40)]).mean(0)
    torch.testing.assert_close(average.model.weight.double(), expected, rtol=1e-5, atol=1e-6)


def test_before_it_starts_the_weights_themselves_are_evaluated():
    model = nn.Linear(3, 2)
    average = Average(AverageConfig(name="swa", start=0.5), model, total=40)
    wander(model, average, 20)
    assert average.model is model
    wander(model, average, 1, first=20)
    assert average.model is not model
    assert Average(AverageConfig(), model, total=40).model is model


@pytest.mark.parametrize("name", ["ema", "swa"])
def test_batch_norms_statistics_are_averaged_and_its_count_is_the_last(name):
    model = nn.BatchNorm1d(2)
    average = Average(AverageConfig(name=name, start=0.0), model, total=8)
    for step in range(8):
        model(torch.randn(4, 2, generator=torch.Generator().manual_seed(step)))
        average.update(step + 1)
    assert not torch.equal(average.model.running_mean, model.running_mean)
    if name == "ema":
        assert average.model.num_batches_tracked == 8


@pytest.mark.parametrize("name", ["ema", "swa"])
def test_an_average_goes_on_from_its_state(name):
    model = nn.Linear(3, 2)
    config = AverageConfig(name=name, decay=0.9, start=0.1)
    one = Average(config, model, total=40)
    wander(model, one, 20)
    state = copy.deepcopy(one.state())
    other = Average(config, model, total=40)
    other.load(state)
    wander(model, one, 20, first=20)
    wander(model, other, 20, first=20)
    assert torch.equal(one.model.weight, other.model.weight)
    assert one.state()["updates"] == other.state()["updates"]


@pytest.mark.parametrize("name", ["ema", "swa"])
def test_what_is_frozen_is_held_once_and_what_is_infinite_stays(name):
    """A mask less itself would be NaN."""
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    bias, mask = model.bias.detach().clone(), model.mask.clone()
    average = Average(AverageConfig(name=name, start=0.0), model, total=8)
    for step in range(8):
        with torch.no_grad():
            model.weight.add_(1.0)
        average.update(step + 1)
    assert average.model.bias is model.bias and average.model.weight is not model.weight
    assert torch.equal(average.model.bias, bias) and torch.equal(average.model.mask, mask)
    assert not torch.equal(average.model.weight, model.weight)
