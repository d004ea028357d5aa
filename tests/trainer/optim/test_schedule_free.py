"""Schedule-free training in whole runs: evaluations and checkpoints show the average, training goes on beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from trainer_runs import Toy, Trial

from trainer.checkpoint.files import read, read_model
from trainer.config import OptimConfig
from trainer.optim import build as optim
from trainer.optim.schedule_free import EvaluationPoint, ScheduleFree

OPTIM: dict[str, Any] = {"name": "schedule_free", "lr": 0.05}


class Watched(Toy):
    """Keeps the weights that were evaluated last."""

    evaluated: dict[str, torch.Tensor]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.evaluated = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return super().evaluate(model)


def test_evaluations_and_exports_show_the_average_of_the_steps(tmp_path):
    trial = Trial(tmp_path, Watched, optim=OPTIM)
    outcome = trial.attempt()
    assert outcome is not None and outcome.kind == "complete"
    directory = trial.reporter.committed[0].path
    exported, _ = read_model(directory)
    assert exported.keys() == trial.task.evaluated.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in trial.task.evaluated.items())
    state, _ = read(directory, None)
    for name, p in trial.task.net.named_parameters():
        y, z = state["model"][name].double(), state["optimizer"]["state"][name]["z"].double()
        assert torch.equal(state["model"][name], p)
        torch.testing.assert_close(exported[name].double(), (y - 0.1 * z) / 0.9, rtol=0, atol=1e-6)
        assert not torch.equal(exported[name], p)


def test_batch_norms_statistics_have_the_weights_of_the_steps():
    """Rates 1, 2 and 2 weigh 1, 4 and 4."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    optimizer = optim.build(OptimConfig(**OPTIM), model)
    assert isinstance(optimizer, ScheduleFree)
    point, means = EvaluationPoint(optimizer, model), []
    assert point.model is model
    for step, lr in enumerate((0.01, 0.02, 0.02)):
        optimizer.param_groups[0]["lr"] = lr
        model(torch.randn(4, 2, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
        point.update(step + 1)
        means.append(model[0].running_mean.clone())
    expected = (means[0] + 4 * means[1] + 4 * means[2]) / 9
    torch.testing.assert_close(point.model[0].running_mean, expected)
    assert point.model[0].num_batches_tracked == 3
    assert torch.equal(point.model[0].weight, optimizer.averaged()[model[0].weight])


def test_a_rate_of_zero_moves_nothing_and_weighs_nothing():
    model = nn.Linear(3, 2)
    optimizer = optim.build(OptimConfig(**OPTIM), model)
    before = model.weight.detach().clone()
    for lr in (0.0, 0.05):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[-1]["lr"] = lr
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert torch.equal(model.weight, before) == (lr == 0.0)
    assert torch.isfinite(model.weight).all()
