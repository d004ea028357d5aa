"""Initialisation by name: torch's own functions on the same random numbers, and the moments the papers derive."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from trainer.config import InitConfig, TrainConfig
from trainer.model.init import initialise
from trainer.runtime.seeding import derive

NAMES = ("xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "orthogonal", "trunc_normal", "normal")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.conv = nn.Conv1d(16, 32, 3)
        self.norm = nn.BatchNorm1d(32)
        self.hidden = nn.Linear(400, 300)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.full((3, 3), 2.0))
        self.tied = nn.Linear(16, 20, bias=False)
        self.tied.weight = self.embedding.weight
        self.out = nn.Linear(300, 10)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def drawn(name: str, seed: int = 1, **fields) -> Net:
    return initialise(net(), InitConfig(name=name, **fields), seed)


@pytest.mark.parametrize("name", NAMES)
def test_only_trained_weights_of_linear_layers_and_convolutions_are_drawn(name):
    before, after = net().state_dict(), drawn(name).state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"conv.weight", "hidden.weight", "out.weight"}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_torchs_own_on_the_weights_own_numbers(name):
    generator = torch.Generator().manual_seed(derive(1, "weights/hidden"))
    expected = torch.empty(300, 400)
    options = {"nonlinearity": "relu"} if name.startswith("kaiming") else {}
    options |= {"std": 0.02} if name == "normal" else {}
    options |= {"std": 0.02, "a": -0.04, "b": 0.04} if name == "trunc_normal" else {}
    getattr(nn.init, f"{name}_")(expected, generator=generator, **options)
    assert torch.equal(drawn(name).hidden.weight, expected)


@pytest.mark.parametrize(
    ("name", "variance", "largest"),
    [
        ("xavier_uniform", 2 / 700, math.sqrt(6 / 700)),
        ("xavier_normal", 2 / 700, None),
        ("kaiming_uniform", 2 / 400, math.sqrt(6 / 400)),
        ("kaiming_normal", 2 / 400, None),
        ("normal", 0.02**2, None),
        ("trunc_normal", 0.7737 * 0.02**2, 0.04),
    ],
)
def test_moments(name, variance, largest):
    weight = drawn(name).hidden.weight.double()
    assert weight.mean().item() == pytest.approx(0, abs=4 * math.sqrt(variance / weight.numel()))
    assert weight.var().item() == pytest.approx(variance, rel=0.03)
    if largest is not None:
        assert 0.99 * largest < weight.abs().max().item() <= largest * (1 + 1e-6)


def test_orthogonal_rows():
    weight = drawn("orthogonal", gain=2.0).hidden.weight.double()
    assert torch.allclose(weight @ weight.T, 4 * torch.eye(300, dtype=torch.float64), atol=1e-5)


def test_a_layer_has_the_same_weights_whatever_else_the_model_has():
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.Linear(400, 300)

    alone = initialise(Alone(), InitConfig(name="normal"), 1)
    assert torch.equal(alone.hidden.weight, drawn("normal").hidden.weight)
    assert not torch.equal(alone.hidden.weight, drawn("normal", seed=2).hidden.weight)


def test_the_last_layer_starts_at_zero():
    model = drawn("default", zero_last=True)
    assert not model.out.weight.any() and not model.out.bias.any()
    assert torch.equal(model.hidden.weight, net().hidden.weight)
    assert initialise(nn.LayerNorm(3), InitConfig(zero_last=True), 0).weight.all()


@pytest.mark.parametrize("given", [{"gain": 2.0}, {"name": "normal", "gain": 2.0}, {"name": "orthogonal", "std": 1.0}])
def test_what_would_be_ignored_is_refused(given):
    with pytest.raises(ValidationError, match="is read only with"):
        TrainConfig.model_validate({"init": given})
