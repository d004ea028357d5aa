"""`train.freeze`: the rest trains first, and what was frozen begins as it would have alone."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from trainer_runs import Toy, Trial, killed_at, uninterrupted

from trainer.config import TrainConfig
from trainer.data import TensorDataset
from trainer.errors import ConfigError
from trainer.task import Loss, Task

STEPS, FROZEN = 6, 3  # steps of the run, and those of the first phase


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


class Regression(Task):
    """Two layers in float64; a step is the whole data."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        return self.net

    def train_set(self) -> TensorDataset:
        return data()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(((model(x) - y) ** 2).sum(), len(y))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"val/frozen": float(model[0].weight.sum())}


CONFIG = {
    "num_epochs": STEPS, "batch_size": 16, "micro_batch_size": 16, "optim": {"lr": 0.05, "weight_decay": 0.1},
    "clip": {"norm": 0.5}, "freeze": {"patterns": ["0.*"], "until": FROZEN / STEPS},
}  # fmt: skip


def test_the_phases_are_those_of_a_plain_loop_that_adds_a_group(tmp_path):
    trial = uninterrupted(tmp_path, task=Regression, **CONFIG)
    model, [x, y] = Regression(None).model(), data()[:]
    groups = [{"params": [layer.weight], "weight_decay": 0.1} for layer in (model[2], model[0])]
    biases = [{"params": [layer.bias], "weight_decay": 0.0} for layer in (model[2], model[0])]
    optimizer = torch.optim.AdamW([groups[0], biases[0]], lr=0.05)
    for step in range(STEPS):
        if step == FROZEN:
            optimizer.add_param_group(groups[1])
            optimizer.add_param_group(biases[1])
        optimizer.zero_grad()
        trained = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        gradients = torch.autograd.grad(((model(x) - y) ** 2).mean(), trained)
        for p, gradient in zip(trained, gradients, strict=True):
            p.grad = gradient
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
    for p, expected in zip(trial.task.net.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-9, atol=1e-12)
    values = [trial.reporter.values[step, "val/frozen"] for step in range(1, STEPS + 1)]
    assert len({*values[:FROZEN]}) == 1 and len({*values}) == 1 + STEPS - FROZEN


@pytest.mark.parametrize("step", [2, 4, 5, 7])
def test_a_run_that_is_cut_in_either_phase_ends_with_the_same_bits(step, tmp_path):
    frozen = {"freeze": {"patterns": ["0.*", "1.*"], "until": 0.5}}
    oracle = uninterrupted(tmp_path / "oracle", **frozen)
    trial = Trial(tmp_path / "cut", **frozen)
    assert trial.attempt(killed_at(step)) is None
    outcome = trial.attempt()
    assert outcome is not None and outcome.kind == "complete"
    assert trial.digest() == oracle.digest() != uninterrupted(tmp_path / "joint").digest()


@pytest.mark.parametrize("optim", [{"name": "muon"}, {"name": "sgd"}, {"wrap": "sam"}, {"wrap": "lookahead"}])
def test_frozen_parameters_stay_to_the_bit_under_other_steps(optim, tmp_path):
    whole = {"optim": optim, "gradients": {"centralize": True}, "freeze": {"patterns": ["0.*"], "until": 1.0}}
    trial = uninterrupted(tmp_path, task=Regression, **whole)
    begun = Regression(None).model()
    assert torch.equal(trial.task.net[0].weight, begun[0].weight) and torch.equal(trial.task.net[0].bias, begun[0].bias)
    assert not torch.equal(trial.task.net[2].weight, begun[2].weight)


@pytest.mark.parametrize(
    ("patterns", "sentence"),
    [
        (["0.*", "head.*"], r"no parameter's name matches 'head\.\*'; this model's names are such as 0\.weight"),
        (["*"], r"\['\*'\] match every parameter, and none is left to train: leave some of them out"),
    ],
)
def test_patterns_that_do_not_fit_the_model_are_refused(patterns, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        Trial(tmp_path, task=Toy, freeze={"patterns": patterns}).attempt()


@pytest.mark.parametrize("other", [{"lanes": 2}, {"parallel": {"pipeline": 2}, "micro_batch_size": 4}])
def test_what_needs_all_parameters_at_each_step_is_refused(other):
    with pytest.raises(ValueError, match=r"freeze\.patterns"):
        TrainConfig.model_validate({"freeze": {"patterns": ["0.*"]}, "batch_size": 16} | other)
