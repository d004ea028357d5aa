"""Models with lazy layers are trained as those whose sizes are written."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from trainer_runs import Toy, Trial, killed_at

from trainer.checkpoint import files
from trainer.errors import ConfigError
from trainer.model.export import export
from trainer.model.lazy import materialised
from trainer.task import built

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")


class Lazy(Toy):
    def model(self):
        self.net = nn.Sequential(
            nn.LazyLinear(12), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Dropout(0.3), nn.LazyLinear(3)
        )  # fmt: skip
        return self.net


class InTraining(Lazy):
    """One of its layers is called in training alone."""

    def model(self):
        class Auxiliary(nn.Module):
            def __init__(self, net):
                super().__init__()
                self.net, self.norm, self.aside = net, nn.LazyBatchNorm1d(), nn.LazyLinear(3)

            def forward(self, x):
                return self.net(x) + (self.aside(self.norm(x)) if self.training else 0)

        self.net = Auxiliary(super().model())
        return self.net


class Unused(Lazy):
    def model(self):
        class Half(nn.Module):
            def __init__(self, net):
                super().__init__()
                self.net, self.aside = net, nn.LazyLinear(3)

            def forward(self, x):
                return self.net(x)

        return Half(super().model())


@pytest.mark.parametrize("task", [Lazy, InTraining])
@pytest.mark.parametrize("options", [{}, {"average": {"name": "ema"}, "init": {"name": "xavier_uniform"}}])
def test_it_is_trained_and_resumed(task, options, tmp_path):
    whole, parts = Trial(tmp_path / "whole", task=task, **options), Trial(tmp_path / "parts", task=task, **options)
    assert whole.attempt().kind == "complete"
    parts.attempt(killed_at(5))
    assert parts.attempt().kind == "complete"
    assert parts.digest() == whole.digest()


def test_it_begins_as_the_model_of_the_same_weights_and_statistics(tmp_path):
    torch.manual_seed(3)
    lazy = materialised(built(InTraining(None)), InTraining(None), Trial(tmp_path).config)
    for module in lazy.modules():
        if isinstance(module, nn.BatchNorm1d):
            assert module.running_mean.eq(0).all() and module.num_batches_tracked == 0
    assert [type(layer) for layer in lazy.net] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Dropout, nn.Linear]
    assert lazy.training


def test_its_weights_depend_on_the_seed_alone(tmp_path):
    config, found = Trial(tmp_path).config, []
    for warm in (0, 7):
        torch.rand(warm)
        found.append(materialised(built(Lazy(None)), Lazy(None), config).state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*(state.values() for state in found), strict=True))


def test_its_checkpoint_loads_into_a_model_of_unknown_sizes(tmp_path):
    trial = Trial(tmp_path, task=Lazy)
    trial.attempt()
    weights, _ = files.read_model(trial.reporter.committed[0].path)
    again, x = built(Lazy(None)), torch.randn(4, 6)
    again.load_state_dict(weights)
    assert torch.equal(again.eval()(x), trial.task.net.eval()(x))


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        (Unused, {}, "Half has a lazy layer 'aside' that the loss of Unused does not call"),
        (Lazy, {"memory_limit": "8GiB"}, "Lazy has lazy layers, whose sizes no estimate of memory knows"),
        (Lazy, {"peak_tflops": 1.0}, "Lazy has lazy layers, whose operations cannot be counted"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(task, options, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        Trial(tmp_path, task=task, **options).attempt()


def test_it_is_exported(tmp_path):
    trial = Trial(tmp_path, task=Lazy)
    trial.attempt()
    with torch.no_grad():
        made = export(trial.task, trial.config, trial.task.net.eval(), "safetensors", tmp_path / "net.safetensors", {})
    assert made.difference == 0
