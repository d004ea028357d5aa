"""A step without torch's mark is the step, and an optimizer with hooks keeps them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainer.config import OptimConfig
from trainer.optim.build import build
from trainer.optim.unwrapped_step import unmarked


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


TRAINED = """
import sys, tempfile
from pathlib import Path
import torch
from torch import nn
from trainer.checkpoint.store import CheckpointStore
from trainer.config import TrainConfig
from trainer.data import TensorDataset
from trainer.loop import fit
from trainer.optim.build import build
from trainer.report import Silent
from trainer.settings import runtime
from trainer.task import Loss, Task


class Line(Task):
    def model(self):
        return nn.Linear(2, 1)

    def train_set(self):
        return TensorDataset(torch.randn(8, 2))

    def loss(self, model, batch):
        return Loss(model(batch[0]).square().sum(), len(batch[0]))

    def evaluate(self, model):
        return {"val/loss": 0.0}


for name in ("adamw", "sgd", "muon", "sm3"):
    task = type("Deep", (Line,), {"model": lambda self: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))})(None)
    config = TrainConfig.model_validate({"num_epochs": 1, "optim": {"name": name}})
    with tempfile.TemporaryDirectory() as directory:
        assert fit(task, config, Silent(), CheckpointStore(Path(directory), fence=1)).kind == "complete"
costly = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor")
print([name for name in costly if name in sys.modules])
methods = [one.__wrapped__ for one in vars(torch.optim.Optimizer).values() if hasattr(one, "__wrapped__")]
print(len(methods) > 3, [one.__name__ for one in methods if hasattr(one, "__dynamo_disable")])
model = nn.Linear(2, 1)
optimizer = build(config.optim, model)
with runtime(TrainConfig()):
    import torch._inductor.config as compilers
    print(compilers.deterministic, torch.are_deterministic_algorithms_enabled())
print(compilers.deterministic, torch.are_deterministic_algorithms_enabled())
optimizer.zero_grad()
instead = getattr(type(optimizer).zero_grad.__wrapped__, "__dynamo_disable")
print("torch._dynamo" in sys.modules, "_dynamo" in instead.__module__)
"""


def test_a_fit_imports_no_compiler_and_one_that_comes_later_is_told(process):
    """That it is to be deterministic; and torch's optimizers, as torch made them, keep their methods from it."""
    ran = subprocess.run([sys.executable, "-c", TRAINED], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["[]", "True []", "True True", "False False", "True True"]
