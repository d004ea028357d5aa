"""A step on a GPU launches about what a loop by hand does, and waits for nothing between reads of the meter."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from small_tasks import NAMES, around_each_step, small, trained
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from trainer import step
from trainer.config import TrainConfig
from trainer.gradients.nonfinite import Flags
from trainer.model.running_statistics import RunningStatistics
from trainer.optim.build import build

CPU = torch.device("cpu")
VIEWS = {"aten.detach.default", "aten.t.default", "aten.view.default", "aten.unbind.int", "aten.select.int"}
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="runs where torch finds a GPU, by make test-gpu")


class Launches(TorchDispatchMode):
    """Counts the operations that a GPU would launch."""

    def __init__(self):
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith("aten.") and str(func) not in VIEWS:
            self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(step, "skips_on_device", lambda optimizer, device: True)


def steps_of(name, directory, **train):
    """What each step of a fit launches, but for the first, which makes the optimizer's state."""
    counts = []

    def counted(fit):
        counts.append(Launches())
        return counts[-1]

    task, config = small(name, **train)
    with around_each_step(counted):
        trained(task, config, directory)
    return [launches.count for launches in counts[1:]]


def by_hand(config: TrainConfig, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Counter[str]:
    """What a step of a loop by hand launches."""
    optimizer = build(config.optim, model)
    for launches in (nullcontext(), counted := Launches()):
        with launches:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return counted.count


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("limit", [1.0, 0.5])
def test_a_step_launches_about_what_a_loop_by_hand_does(limit, tmp_path):
    """The flag of the guard is one launch, and its subtraction from the count of steps one for each of two groups; a
    loop by hand has two more to clip."""
    task, config = small("mlp", clip={"norm": limit})
    hand = by_hand(config, task.model(), torch.randn(8, 64), torch.zeros(8, dtype=torch.long))
    steps = steps_of("mlp", tmp_path, clip={"norm": limit})
    mean = sum(count.total() for count in steps) / len(steps)
    assert mean < hand.total() + (1.5 if limit == 1.0 else 2.5), sum(steps, Counter()) - hand


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_reads_no_number_from_the_device(name, precision, tmp_path):
    steps = steps_of(name, tmp_path, precision=precision, micro_batch_size=3)
    assert len(steps) > 10
    assert not [i for i, count in enumerate(steps) if count["aten._local_scalar_dense.default"]]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_bf16_keeps_weights_gradients_and_the_optimizers_state_in_fp32(tmp_path):
    kinds = set()

    class Seen:
        def __init__(self, fit):
            self.state = fit.state

        def __enter__(self):
            pass

        def __exit__(self, *_):
            params = [*self.state.model.parameters()]
            kept = [value for p in params for value in self.state.optimizer.state[p].values()]
            kinds.update(tensor.dtype for tensor in (*params, *(p.grad for p in params), *kept))

    task, config = small("mlp", precision="bf16", num_epochs=1)
    with around_each_step(Seen):
        trained(task, config, tmp_path)
    assert kinds == {torch.float32}


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize(
    ("name", "micro_batch_size", "compiled"),
    [*((name, size, False) for name in NAMES for size in (None, 3)), ("mlp", None, True), ("mlp", 3, "graphs")],
)
def test_a_gpu_is_waited_for_only_where_the_meter_is_read(name, micro_batch_size, compiled, tmp_path):
    """A step that waits where it must not raises RuntimeError, by torch's debug mode "error"."""
    modes = Counter()

    class Watched:
        def __init__(self, fit):
            last = (fit.state.step + 1) % fit.config.guard.max_consecutive == 0
            first = fit.state.epoch < 2  # in which shapes are compiled, and graphs recorded at their second call
            self.mode = "default" if last or first else "error"

        def __enter__(self):
            modes[self.mode] += 1
            torch.cuda.set_sync_debug_mode(self.mode)

        def __exit__(self, *_):
            torch.cuda.set_sync_debug_mode("default")

    task, config = small(name, micro_batch_size=micro_batch_size, num_epochs=3, batch_size=32, compile=compiled)
    with around_each_step(Watched):
        trained(task, config, tmp_path)
    assert modes["error"] > 0, "no step was watched"


@pytest.mark.parametrize("loss", [1.0, torch.tensor(3.0), torch.tensor(3.0).double()])
@pytest.mark.parametrize(("norm", "flag"), [(2.0, 0.0), (float("nan"), 1.0), (float("inf"), 1.0), (-float("inf"), 1.0)])
def test_a_flag_is_raised_by_what_is_not_finite(norm, flag, loss):
    flags, number = Flags(CPU), torch.tensor(norm)
    assert [flags.of(number, loss).item() for _ in range(40)] == [flag] * 40
    assert repr(number.item()) == repr(norm)


@pytest.mark.parametrize("bad", [0.0, 1.0])
def test_statistics_are_restored_to_the_bit_where_a_flag_is_raised(bad):
    model = nn.Sequential(nn.BatchNorm1d(5), nn.BatchNorm1d(3, dtype=torch.float64))
    for tensor in model.buffers():
        tensor.random_(0, 9)
    statistics, before = RunningStatistics(model), [buffer.clone() for buffer in model.buffers()]
    statistics.remember()
    for tensor in model.buffers():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 77)
    moved = [buffer.clone() for buffer in model.buffers()]
    statistics.restore_where(torch.tensor(bad))
    for now, expected in zip(model.buffers(), before if bad else moved, strict=True):
        torch.testing.assert_close(now, expected, rtol=0, atol=0, equal_nan=True)
