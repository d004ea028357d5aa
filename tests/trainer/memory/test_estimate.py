"""The memory estimate against what torch's profiler sees of a real step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.profiler import ProfilerActivity, profile

from trainer.config import OptimConfig, TrainConfig
from trainer.config.optim import OPTIMIZERS
from trainer.data import TensorDataset
from trainer.diagnose.trial import Steps, fresh
from trainer.memory.estimate import Estimate, estimate, plan
from trainer.optim import build as optim
from trainer.task import Loss, Task

MIB = 2**20


class Regression(Task):
    """`build` makes the model; the loss is a sum of squares."""

    def __init__(self, build, batch=()) -> None:
        self.build, self.batch = build, batch

    def model(self):
        return self.build()

    def train_set(self):
        return TensorDataset(*self.batch)

    def loss(self, model, batch):
        x, y = batch
        return Loss(((model(x) - y) ** 2).sum(), len(x))


def perceptron(width: int):
    return lambda: nn.Sequential(
        nn.Linear(256, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8)
    )


def convolution(width: int):
    def build():
        layers = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(3):
            layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 8))

    return build


def transformer(width: int):
    def build():
        block = lambda: nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.1)  # noqa: E731
        return nn.Sequential(*[block() for _ in range(4)], nn.Linear(width, 8))

    return build


def batch_of(family, size: int):
    if family is perceptron:
        return torch.randn(size, 256), torch.randn(size, 8)
    if family is convolution:
        return torch.randn(size, 3, 16, 16), torch.randn(size, 8)
    return torch.randn(size, 32, 512 if size > 8 else 128), torch.randn(size, 32, 8)


def high_water_mark(task: Task, config: TrainConfig, batch) -> int:
    """The most bytes of live tensors in two real steps, by the profiler's memory events."""
    model = task.model()
    optimizer = optim.build(config.optim, model)
    now = sum(t.nbytes for t in [*model.parameters(), *model.buffers(), *batch])
    now += sum(t.nbytes for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t))
    peak = now
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(2):
            loss = task.loss(model, batch)
            loss.sum.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def check(family, width: int, size: int, optimizer: str) -> int:
    task, batch = Regression(family(width)), batch_of(family, size)
    config = TrainConfig(batch_size=size, optim=OptimConfig(name=optimizer))
    found = estimate(task, config, batch)
    real = high_water_mark(task, config, batch)
    assert abs(found.peak / real - 1) < 0.15, f"{found} against {real / MIB:.1f} MiB"
    assert found.gradients == sum(p.nbytes for p in task.model().parameters())
    assert found.optimizer >= {"adamw": 2, "sgd": 1}[optimizer] * found.gradients
    return real


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("family", "width"), [(perceptron, 512), (convolution, 160), (transformer, 128)])
def test_the_estimate_is_near_the_high_water_mark(family, width, optimizer):
    check(family, width, 8, optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_any_optimizer_keeps_is_in_the_estimate(name):
    task, batch, config = Regression(perceptron(64)), batch_of(perceptron, 8), OptimConfig(name=name)
    found = estimate(task, TrainConfig(batch_size=8, optim=config), batch)
    optimizer = optim.build(config, model := task.model())
    for _ in range(2):
        task.loss(model, batch).sum.backward()
        optimizer.step()
    kept = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    assert found.optimizer == sum(t.nbytes for t in kept)


COPIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ema": {"average": {"name": "ema"}},
    "swa": {"average": {"name": "swa", "start": 0.0}},
    "lookahead": {"optim": {"wrap": "lookahead", "lookahead": {"k": 1}}},
    "ranger": {"optim": {"name": "ranger"}, "average": {"name": "ema"}},
    "sam": {"optim": {"name": "sgd", "wrap": "sam"}},
    "asam": {"optim": {"name": "sgd", "wrap": "sam", "sam": {"adaptive": True}}},
    "noise": {"gradients": {"noise_scale": True}, "micro_batch_size": 4},
    "full": {"activations": {"checkpoint": "full"}},
    "selective": {"activations": {"checkpoint": "selective"}},
    "disk": {"activations": {"offload": "disk"}},
    "penalty": {"gradients": {"penalty": 1.0, "penalty_of": "loss"}},
}


def high_water_mark_of_fit(task: Task, config: TrainConfig) -> int:
    """The most bytes of live tensors in two real steps of the trainer."""
    with fresh(task, config) as fit:
        s, steps = fit.state, Steps(fit, 2)
        alive = {id(t.untyped_storage()): t.untyped_storage() for t in (*s.model.parameters(), *s.model.buffers())}
        kept = [
            *(s.average._averaged.state_dict().values() if s.average._averaged else ()),
            *(s.lookahead.slow.values() if s.lookahead else ()),
            *(t for state in s.optimizer.state.values() for t in state.values()),
        ]
        now = peak = sum(storage.nbytes() for storage in alive.values()) + sum(t.nbytes for t in kept)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for _ in range(2):
                steps.take(0.01)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


HALF: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "loss_scale": {"init": 1.0}},  # no step overflows: each takes its own
}


class InFull(Regression):
    """The loss is summed up in fp32, whatever the model computes in."""

    def loss(self, model, batch):
        x, y = batch
        return Loss(((model(x).float() - y) ** 2).sum(), len(x))


def check_copies(given: dict[str, Any], family, width: int, size: int) -> tuple[int, Estimate]:
    batch = batch_of(family, size)
    task, config = (
        InFull(family(width), batch),
        TrainConfig.model_validate({"batch_size": size, "num_epochs": 9} | given),
    )
    found = estimate(task, config, tuple(t[: config.fixed_micro_batch_size] for t in batch))
    real = high_water_mark_of_fit(task, config)
    assert abs(found.peak / real - 1) < 0.15, f"{found} against {real / MIB:.1f} MiB"
    return real, found


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_the_weights_are_in_the_estimate(name):
    """Against the trainer's own steps; what an average and Lookahead keep is as large as the weights."""
    _, found = check_copies(COPIES[name], perceptron, 512, 8)
    kept = {"ema": 1, "swa": 1, "lookahead": 1, "ranger": 2}.get(name, 0)
    assert found.copies == pytest.approx(kept * found.parameters, rel=1e-4)


OF_HALVES = [
    pytest.param(
        name, family, width, optimizer, marks=() if optimizer == "adamw" or family is perceptron else pytest.mark.slow
    )
    for name in HALF
    for family, width in ((perceptron, 512), (transformer, 128), (convolution, 64))
    for optimizer in ("adamw", "sgd")
]


@pytest.mark.parametrize(("name", "family", "width", "optimizer"), OF_HALVES)
def test_what_half_precision_takes_is_in_the_estimate(name, family, width, optimizer):
    """Where the processor has no such convolution, torch's own copies its input within the operation."""
    check_copies(HALF[name] | {"optim": {"name": optimizer}}, family, width, 8)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("name", "family"), [("bf16", perceptron), ("bf16", transformer), ("fp16", perceptron)])
def test_what_half_precision_takes_of_large_states_is_in_the_estimate(name, family, optimizer):
    width = {perceptron: 3072, transformer: 512}[family]
    assert check_copies(HALF[name] | {"optim": {"name": optimizer}}, family, width, 32)[0] > 100 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize(("family", "width"), [(perceptron, 3072), (convolution, 448), (transformer, 512)])
def test_copies_of_large_states_are_in_the_estimate(family, width, name):
    assert check_copies(COPIES[name], family, width, 32)[0] > 100 * MIB


@pytest.mark.slow
@pytest.mark.parametrize(("family", "width"), [(perceptron, 3072), (convolution, 448), (transformer, 512)])
def test_the_estimate_is_near_the_high_water_mark_of_large_states(family, width):
    assert check(family, width, 32, "adamw") > 100 * MIB


def test_accumulation_holds_gradients_while_activations_stand():
    task, batch = Regression(perceptron(512)), batch_of(perceptron, 64)
    whole = estimate(task, TrainConfig(batch_size=64), batch)
    parts = estimate(task, TrainConfig(batch_size=128, micro_batch_size=64), batch)
    assert parts.peak > whole.peak


def test_a_task_that_looks_at_values_says_so():
    class Looks(Regression):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            assert loss.sum.item() >= 0
            return loss

    with pytest.raises(DataDependentOutputException):
        estimate(Looks(perceptron(8)), TrainConfig(), batch_of(perceptron, 8))


def test_the_micro_batch_is_halved_until_the_estimate_fits():
    task, config = Regression(perceptron(512)), TrainConfig(batch_size=256)
    sizes = [256 >> i for i in range(9)]
    peaks = {n: estimate(task, config, batch_of(perceptron, n), accumulates=n < 256).peak for n in sizes}
    for limit in (peaks[256], peaks[256] - 1, peaks[64], peaks[64] - 1, peaks[1], 1):
        found = plan(task, config, limit, 256, lambda size: batch_of(perceptron, size))
        fits = next((n for n in sizes if peaks[n] <= limit), None)
        assert (found.fits, found.requested.peak) == (fits, peaks[256])
    assert "not even 1 fits" in found.refusal()
