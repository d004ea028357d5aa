"""Plain attributes that training changes are named, and nothing else is."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from trainer_runs import Toy, Trial, killed_at

from trainer.model.attributes import Attributes


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.table, self.names, self.rate = torch.ones(3), ["a"], 0.1
        self.drawn, self.numbers, self.kept = random.Random(0), np.random.default_rng(0), torch.Generator()


def count(net):
    net.seen = getattr(net, "seen", 0) + 1


def widen(net):
    net.register_buffer("late", torch.ones(2), persistent=False)


CHANGES = {
    "seen": count,
    "table": lambda net: net.table.add_(1),
    "names": lambda net: net.names.append("b"),
    "rate": lambda net: setattr(net, "rate", net.rate * 0.9),
    "drawn": lambda net: net.drawn.random(),
    "numbers": lambda net: net.numbers.random(),
    "kept": lambda net: torch.rand(1, generator=net.kept),
    "linear.calls": lambda net: setattr(net.linear, "calls", {"of": (1, 2)}),
    "late": widen,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named(name):
    net = Own()
    attributes = Attributes(net)
    assert attributes.changed() == []
    CHANGES[name](net)
    assert attributes.changed() == [name]


def test_an_optimizer_within_a_users_own_is_named():
    class Around(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})
            self.inner, self.calls = torch.optim.Adam(self.param_groups), 0

        def step(self, closure=None):
            self.inner.step()
            self.calls += 1

    net = nn.Linear(2, 2)
    optimizer = Around([*net.parameters()])
    attributes = Attributes(net, optimizer)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert attributes.changed() == ["Around.inner", "Around.calls"]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_what_is_computed_from_weights_is_not_named():
    """weight_norm's tensors, and an LSTM's lists of its own weights."""
    net = nn.ModuleDict({"normed": nn.utils.weight_norm(nn.Linear(2, 2)), "lstm": nn.LSTM(2, 2)})  # pyright: ignore
    attributes = Attributes(net)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1)
    net["normed"](torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        net["normed"](torch.ones(1, 2))
    net.eval()
    assert attributes.changed() == []


class Counting(Toy):
    def model(self):
        class Counted(nn.Sequential):
            seen = 0

            def forward(self, x):
                self.seen += 1
                return super().forward(x)

        self.net = Counted(*super().model())
        return self.net


def test_a_trial_says_once_what_no_checkpoint_holds(tmp_path):
    trial = Trial(tmp_path, task=Counting, num_epochs=3)
    trial.attempt(killed_at(6))
    trial.attempt()
    [(kind, fields)] = trial.reporter.events
    assert (kind, fields["step"], fields["names"]) == ("unsaved_attributes", 1, ["seen"])
    assert "training changes seen, which no checkpoint holds" in fields["reason"]
    assert "get_extra_state" in fields["reason"]


@pytest.mark.parametrize("optim", ["adamw", "muon", "sophia", "shampoo", "own_optimizers:Groups"])
def test_an_ordinary_trial_says_nothing(optim, tmp_path):
    trial = Trial(tmp_path, optim={"name": optim})
    trial.attempt()
    assert trial.reporter.events == []
