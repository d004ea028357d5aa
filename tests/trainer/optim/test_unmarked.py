"""A step without torch's mark is the step, and an optimizer with hooks keeps them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainer.config import OptimConfig
from trainer.optim.build import build
from trainer.optim.unmarked import unmarked


def made(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    return model, build(OptimConfig.model_validate({"name": name}), model)


def marks(step) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return sum("Optimizer.step" in one.key for one in profile.key_averages())


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "lamb", "adafactor"])
def test_a_step_without_its_mark_is_the_step_to_the_bit(name):
    weights = []
    for bare in (False, True):
        model, optimizer = made(name)
        step = unmarked(optimizer) if bare else optimizer.step
        for k in range(3):
            for p in model.parameters():
                p.grad = torch.sin(torch.arange(p.numel()) + k).view_as(p)
            step()
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        assert optimizer.state
    assert torch.equal(*weights)


def test_the_mark_is_made_under_a_profiler_alone(monkeypatch):
    _, optimizer = made("adamw")
    assert marks(unmarked(optimizer)) == marks(optimizer.step) == 1

    def record(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", record)
    unmarked(optimizer)()
    with pytest.raises(AssertionError, match=r"Optimizer\.step"):
        optimizer.step()


def test_an_optimizer_with_hooks_is_called_with_them():
    _, optimizer = made("adamw")
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("own"))
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append("global"))
    try:
        unmarked(optimizer)()
        assert seen == ["global", "own"]
    finally:
        handle.remove()
