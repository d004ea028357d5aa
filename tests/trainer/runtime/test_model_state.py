"""What a checkpoint holds of a model beside its state_dict; tests/trainer/test_resume.py resumes fits by it."""

from __future__ import annotations

import pytest
import torch
from cut_runs import Centred, Scheduled, toy_with
from torch import nn
from trainer_runs import Trial

from trainer.checkpoint import files
from trainer.errors import ConfigError
from trainer.model import soup
from trainer.model.export import export
from trainer.runtime.model_state import Saved
from trainer.task import built


def test_tables_that_the_constructor_makes_are_not_saved():
    net = nn.Sequential(Centred(), nn.Linear(6, 2))
    saved = Saved(net)
    assert saved.state().keys() == net.state_dict().keys()
    net(torch.ones(4, 6))
    assert saved.state().keys() - net.state_dict().keys() == {"0.mean", "0.square"}


def test_what_was_not_saved_is_again_as_the_constructor_made_it():
    net = Centred()
    saved, before = Saved(net), net.mean.clone()
    begun = {name: value.clone() for name, value in saved.state().items()}
    held_by_others = net.mean
    net(torch.ones(4, 6))
    saved.load(begun)
    assert torch.equal(net.mean, before) and net.square is None
    assert net.mean is held_by_others


def test_whoever_loads_the_checkpoint_computes_what_was_trained(tmp_path):
    """As `Study.load_model`, exports and soups do."""
    for module in (Centred, Scheduled):
        trial = Trial(tmp_path / module.__name__, task=toy_with(module))
        trial.attempt()
        weights, _ = files.read_model(trial.reporter.committed[0].path)
        again = built(trial.task_class(None))
        again.load_state_dict(weights)
        x = torch.randn(5, 6)
        assert torch.equal(again.eval()(x), trial.task.net.eval()(x))
        assert soup.same_architecture(weights, weights)
        again.load_state_dict(soup.mean([weights, weights]))
        assert torch.equal(again(x), trial.task.net(x))


def test_a_checkpoint_that_a_model_without_such_buffers_left_loads(tmp_path):
    net = nn.Sequential(Centred(), nn.Linear(6, 2))
    Saved(net).load(net.state_dict())
    assert net[0].mean.eq(0).all()


def test_extra_state_that_a_file_of_tensors_cannot_hold_is_refused(tmp_path):
    trial = Trial(tmp_path, task=toy_with(Scheduled))
    trial.attempt()
    with pytest.raises(ConfigError, match=r"'0\._extra_state' of Sequential, of its get_extra_state, fits into no"):
        export(trial.task, trial.config, trial.task.net.eval(), "safetensors", tmp_path / "net.safetensors", {})
