"""What the ranks of a test of the memory estimate do: real steps of the trainer, watching what they take of malloc."""

from __future__ import annotations

import ctypes
import gc
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.checkpoint.store import CheckpointStore
from trainer.config import TrainConfig
from trainer.data import TensorDataset
from trainer.diagnose.trial import Steps
from trainer.distributed.join import join
from trainer.loop import Fit
from trainer.memory.estimate import estimate
from trainer.report import Silent
from trainer.settings import runtime
from trainer.task import Loss, Task

MIB = 2**20
SIZE = 32  # samples of a batch


class Perceptron(Task):
    """Of blocks of equal width, for `size` samples of 256 numbers."""

    def __init__(self, width: int) -> None:
        self.width = width

    def model(self) -> nn.Module:
        w = self.width
        hidden = [layer for _ in range(3) for layer in (nn.Linear(w, w), nn.GELU())]
        return nn.Sequential(nn.Linear(256, w), nn.GELU(), *hidden, nn.Linear(w, 8))

    def parallel_plan(self, model: nn.Module) -> dict[str, str]:
        return {"0": "colwise", "2": "rowwise", "4": "colwise", "6": "rowwise"}

    def train_set(self) -> TensorDataset:
        return TensorDataset(torch.randn(4 * SIZE, 256), torch.randn(4 * SIZE, 8))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(((model(x) - y) ** 2).sum(), len(x))


class Deep(Perceptron):
    """Of five blocks, or as many as are asked for."""

    blocks = 5

    def model(self) -> nn.Module:
        w = self.width
        hidden = [nn.Sequential(nn.Linear(w, w), nn.GELU()) for _ in range(self.blocks)]
        return nn.Sequential(nn.Linear(256, w), *hidden, nn.Linear(w, 8))

    def of_depth(self, depth: int) -> Deep:
        found = Deep(self.width)
        found.blocks = depth
        return found


class Encoder(Perceptron):
    """Layers of a transformer."""

    def model(self) -> nn.Module:
        w = self.width
        layers = [nn.TransformerEncoderLayer(w, 4, 4 * w, batch_first=True, dropout=0.1) for _ in range(4)]
        return nn.Sequential(*layers, nn.Linear(w, 8))

    def train_set(self) -> TensorDataset:
        return TensorDataset(torch.randn(4 * SIZE, 16, self.width), torch.randn(4 * SIZE, 16, 8))


TASKS = {"perceptron": Perceptron, "encoder": Encoder}


class _Mallinfo(ctypes.Structure):
    """Of glibc, in bytes."""

    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in names]


def allocated() -> int:
    """The bytes that this process has of malloc, where torch gets the memory of tensors. Its profiler does not hear of
    what gloo's threads give back once it is sent."""
    info = _mallinfo()
    return info.uordblks + info.hblkhd


_mallinfo = ctypes.CDLL(None).mallinfo2
_mallinfo.restype = _Mallinfo


class Highest(TorchDispatchMode):
    """The most that is allocated after any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, allocated())
        return result


def high_water_mark(task: Task, config: TrainConfig) -> int:
    """The most bytes of this rank in two real steps, above what it had before there was a model."""
    data = task.train_set()
    task.train_set = lambda: data  # type: ignore[method-assign]
    gc.collect()
    with runtime(config) as device, tempfile.TemporaryDirectory() as directory:
        before = allocated()
        store = CheckpointStore(Path(directory), fence=1)
        fit = Fit(task, config, Silent(), store, device, join(config.parallel, device))
        fit.ranks.warm_up(fit.state.model, lambda: fit.stepper.loss(0, fit.loader.first()))
        taken = Steps(fit, 2)
        with Highest() as highest:
            for _ in range(2):
                taken.take(0.01)
        fit.loader.close()
    return highest.bytes - before


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """By name of a configuration, the high-water mark of this rank, and the estimate as it hears it."""
    found = {}
    for name, (family, width, given) in job.items():
        task = TASKS[family](width)
        config = TrainConfig.model_validate({"batch_size": SIZE, "num_epochs": 9} | given)
        high_water_mark(TASKS[family](8), config)  # which imports what it takes
        found[name] = {"measured": high_water_mark(task, config), "estimated": asdict(estimated(task, config))}
    return found


def estimated(task: Task, config: TrainConfig) -> Any:
    x, y = task.train_set()[:1]
    size = config.largest_pass
    return estimate(task, config, (x.expand(size, *x.shape[1:]), y.expand(size, *y.shape[1:])))
