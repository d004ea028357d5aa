"""A small task, a reporter that keeps the contract in memory, and runs of `fit` that can be cut anywhere."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainer.checkpoint.store import Changes, CheckpointStore
from trainer.config import TrainConfig
from trainer.data import TensorDataset
from trainer.errors import Stopped
from trainer.loop import fit
from trainer.report import CONTINUE, CheckpointRef, Outcome, Report, Verdict
from trainer.task import Loss, Task


class Killed(Stopped):
    """Stands for SIGKILL: nothing in the trainer may catch it, and all of the attempt's memory is dropped."""


class Toy(Task):
    """44 samples of 6 features in 3 classes; dropout, batch norm and augmentation, all of which draw or keep state."""

    samples = 44

    def model(self) -> nn.Module:
        self.net = nn.Sequential(
            nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3)
        )  # fmt: skip
        return self.net

    def train_set(self) -> TensorDataset:
        x = torch.randn(self.samples, 6)
        return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())

    def augment(self, sample: Any, generator: torch.Generator) -> Any:
        x, y = sample
        return x + 0.1 * torch.randn(x.shape, generator=generator), y

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        out = model(x)
        return Loss(cross_entropy(out, y, reduction="sum"), len(y), {"right": (out.argmax(1) == y).sum()})

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        x = torch.randn(20, 6).to(next(model.parameters()).device)
        return {"val/loss": cross_entropy(model(x), x.new_zeros(20, dtype=torch.long)).item()}


class MemoryReporter:
    """A ledger in memory over all attempts at one trial: first write wins, a decision stands, rows of checkpoints.

    `verdict(step, metrics, epoch)` decides; `cut(read)` may raise at the read-th look at `preempted`, counted over the
    attempt, or answer it.
    """

    def __init__(self, verdict: Callable[..., Verdict] | None = None) -> None:
        self.values: dict[tuple[int, str], float] = {}
        self.epochs: dict[int, int] = {}
        self.decisions: dict[int, Verdict] = {}
        self.committed: list[CheckpointRef] = []
        self.changes: list[tuple[str, dict[str, Any]]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.artifacts: list[tuple[str, str]] = []
        self.replayed: set[int] = set()
        self.verdict = verdict
        self.cut: Callable[[int], bool] = lambda read: False
        self.after_commit: Callable[[int], None] = lambda step: None
        self.fence = 0
        self.reads = 0

    @property
    def preempted(self) -> bool:
        self.reads += 1
        return self.cut(self.reads)

    def report(self, report: Report) -> Verdict:
        step, epoch = report.step, report.epoch
        for key, value in report.metrics.items():
            if (step, key) in self.values:
                self.replayed.add(step)
            first = self.values.setdefault((step, key), value)
            if not key.startswith("time/") and not key.endswith("per_sec"):
                assert repr(first) == repr(value), f"{key} at step {step} was {first!r} and is {value!r} in a replay"
        if epoch is not None:
            self.epochs[step] = epoch
        if report.checkpoint is not None:
            self.committed.insert(0, report.checkpoint)
        if epoch is not None and self.verdict is not None:
            self.decisions.setdefault(step, self.verdict(step, report.metrics, epoch))
        self.after_commit(step)
        return self.decisions.get(step, CONTINUE) if epoch is not None else CONTINUE

    def changed(self, changes: Changes) -> set[str]:
        self.changes.extend((name, dict(values)) for name, values in changes.items())
        gone = {name for name, values in changes.items() if values.get("state") in ("deleted", "damaged")}
        self.committed = [kept for kept in self.committed if kept.path.name not in gone]
        return set()

    def event(self, kind: str, **fields: Any) -> None:
        json.dumps(fields)
        if "step" not in fields or (kind, fields) not in self.events:
            self.events.append((kind, fields))

    def artifact(self, path: Path, name: str | None = None) -> None:
        self.artifacts.append((name or path.name, path.read_text(encoding="utf-8")))


class Trial:
    """A trial over any number of attempts."""

    fit = staticmethod(fit)

    def __init__(
        self,
        directory: Path,
        task: type[Task] = Toy,
        verdict: Callable[..., Verdict] | None = None,
        **config: Any,
    ) -> None:
        base = {"num_epochs": 2, "batch_size": 12, "micro_batch_size": 5, "checkpoint": {"every_steps": 1}}
        self.config = TrainConfig.model_validate(base | config)
        self.directory = directory
        self.task_class = task
        self.reporter = MemoryReporter(verdict)

    def attempt(self, cut: Callable[[int], bool] | None = None, **changes: Any) -> Outcome | None:
        """One attempt, from the last committed checkpoint; None if it was killed."""
        r = self.reporter
        r.fence, r.reads, r.cut = r.fence + 1, 0, cut or (lambda read: False)
        store = CheckpointStore(self.directory, r.fence, list(r.committed), on_change=r.changed)
        self.task = self.task_class(None)
        config = TrainConfig.model_validate(self.config.model_dump() | changes)
        try:
            return self.fit(self.task, config, r, store)
        except Killed:
            return None

    def digest(self) -> str:
        """Of every value reported, but for clocks, and of the final weights: bit for bit."""
        sha = hashlib.sha256()
        for (step, key), value in sorted(self.reporter.values.items()):
            if not key.startswith("time/") and not key.endswith("per_sec"):
                sha.update(f"{step} {key} {'nan' if math.isnan(value) else struct.pack('<d', value).hex()}\n".encode())
        for name, value in self.task.net.state_dict().items():
            is_tensor = isinstance(value, torch.Tensor)
            sha.update(name.encode() + (value.cpu().numpy().tobytes() if is_tensor else repr(value).encode()))
        return sha.hexdigest()


def killed_at(read: int) -> Callable[[int], bool]:
    """Die when `preempted` is read for the `read`-th time: before that step of the attempt, from 1."""

    def cut(count: int) -> bool:
        if count == read:
            raise Killed
        return False

    return cut


def uninterrupted(directory: Path, **kwargs: Any) -> Trial:
    """The oracle: the same trial in one go."""
    trial = Trial(directory, **kwargs)
    assert trial.attempt() is not None
    return trial
