"""Tiny trainings whose numbers depend on as few parts of the trainer as may be.

Weights and data are fixed numbers, the data set has an order of its own, and the optimizer is torch's SGD by its path,
so that a change of the trainer's seeding, of its data order or of its table of optimizers changes none of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer.checkpoint.store import CheckpointStore
from trainer.config import TrainConfig
from trainer.data import TensorDataset
from trainer.loop import fit
from trainer.report import CONTINUE, CheckpointRef, Report, Silent, Verdict
from trainer.task import Loss, Task

MACHINES = ("time/*", "system/*", "*per_sec", "train/mfu", "train/gpu_util")  # metrics that the machine decides
SAMPLES = 34
SGD: dict[str, Any] = {"name": "torch.optim:SGD", "lr": 0.5, "weight_decay": 0.01, "options": {"momentum": 0.5}}
# An epoch has windows of 10, 10, 10 and 4 samples, most of them in micro-batches of 4, 4 and 2.
BASE: dict[str, Any] = {
    "device": "cpu",
    "num_epochs": 3,
    "batch_size": 10,
    "micro_batch_size": 4,
    "optim": SGD,
    "checkpoint": {"every_epochs": None},
}


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns fixed numbers between -1 and 1 of this shape."""
    return 2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) - 1


def filled(model: nn.Module) -> nn.Module:
    """Returns the model with fixed numbers for its parameters."""
    with torch.no_grad():
        for place, p in enumerate(model.parameters()):
            p.copy_(numbers(*p.shape, seed=place, dtype=p.dtype))
    return model


class Rows(TensorDataset):
    """Tensors in an order of their own, which no seed changes."""

    def order(self, seed: int, epoch: int, batch_size: int) -> list[int]:
        return [(5 * place + epoch) % len(self) for place in range(len(self))]


class Tiny(Task):
    """34 samples of 6 features in 3 classes."""

    def layers(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))

    def model(self) -> nn.Module:
        self.net = filled(self.layers())
        return self.net

    def train_set(self) -> TensorDataset:
        return Rows(*labelled(SAMPLES, seed=1))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        out = model(x).float()
        return Loss(cross_entropy(out, y, reduction="sum"), len(y), {"right": (out.argmax(1) == y).sum()})

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        x, y = labelled(20, seed=2)
        return {"val/loss": cross_entropy(model(x).float(), y).item()}


def labelled(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns samples [count, 6] and their classes [count]."""
    x = numbers(count, 6, seed=seed)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


class Walk(torch.optim.Optimizer):
    """Moves weights by fixed amounts, whatever the gradient is, and keeps what an optimizer keeps."""

    def __init__(self, groups: Any, lr: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("step", torch.zeros(()))
                state.setdefault("buffer", torch.zeros_like(p)).add_(0.25)
                state["step"].add_(1)
                p.sub_(state["buffer"])


WALK: dict[str, Any] = {"name": f"{__name__}:{Walk.__name__}", "lr": 0.5}


class Recorder(Silent):
    """Keeps all that a fit tells. `leave_at`: when `preempted` is read for this time, the first attempt is to leave."""

    def __init__(self, verdict: Callable[[int], Verdict] | None, leave_at: int = 0) -> None:
        self.reports: list[Any] = []
        self.events: list[Any] = []
        self.committed: list[CheckpointRef] = []
        self.best: set[str] = set()  # the directories of checkpoints that are called the best
        self._verdict, self._leave_at, self._reads = verdict, leave_at, 0

    @property
    def preempted(self) -> bool:  # type: ignore[override]
        self._reads += 1
        return self._reads == self._leave_at

    def report(self, report: Report) -> Verdict:
        epoch = report.epoch
        self.reports.append([report.step, epoch, report.fold, lasting(report.metrics)])
        if report.checkpoint is not None:
            self.committed.insert(0, report.checkpoint)
        return CONTINUE if epoch is None or self._verdict is None else self._verdict(epoch)

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append([kind, fields.get("step")])

    def changed(self, changes: Mapping[str, Mapping[str, Any]]) -> set[str]:
        for name, values in changes.items():
            if "best" in values:
                (self.best.add if values["best"] else self.best.discard)(name)
        deleted = {name for name, values in changes.items() if values.get("state") == "deleted"}
        self.committed = [ref for ref in self.committed if ref.path.name not in deleted]
        return set()


def trail(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how a training went, without what the trainer measures, which is a part of its own."""
    losses = [[step, epoch, fold, _evaluated(metrics)] for step, epoch, fold, metrics in result["reports"]]
    return {"ends": result["ends"], "losses": losses, "weights": result["weights"]}


def _evaluated(metrics: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if key.startswith("val/")}


def lasting(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics that no machine decides."""
    return {key: float(value) for key, value in metrics.items() if not any(fnmatchcase(key, m) for m in MACHINES)}


def trained(
    task: Callable[[], Task] = lambda: Tiny(None),
    *,
    by: Callable[..., Any] = fit,
    verdict: Callable[[int], Verdict] | None = None,
    leave_at: int = 0,
    **config: Any,
) -> dict[str, Any]:
    """Returns what a training reports, how it ends, its weights, its checkpoints' steps and what the newest holds.

    With `leave_at` a first attempt leaves before that window, and a second one goes on from its checkpoint.
    """
    settings = TrainConfig.model_validate(BASE | config)
    recorder = Recorder(verdict, leave_at)
    with TemporaryDirectory(prefix="hpo-golden-") as directory:
        for attempt in range(1, 3 if leave_at else 2):
            store = CheckpointStore(Path(directory), attempt, recorder.committed, on_change=recorder.changed)
            running = task()
            outcome = by(running, settings, recorder, store)
        return {
            "ends": [outcome.kind, outcome.step, outcome.epoch],
            "reports": recorder.reports,
            "events": recorder.events,
            "weights": {} if (net := getattr(running, "net", None)) is None else net.state_dict(),
            "kept": [[ref.step, ref.epoch, ref.path.name in recorder.best] for ref in recorder.committed],
            "saved": saved(store),
        }


def saved(store: CheckpointStore) -> dict[str, Any] | None:
    """Returns what the newest checkpoint holds: its state, and its manifest but for what differs by save."""
    newest = store.load_latest()
    if newest is None:
        return None
    state, ref = newest
    report = state.pop("report")
    manifest = json.loads((ref.path / "manifest.json").read_text())
    header = {key: value for key, value in manifest.items() if key not in ("files", "state", "torch")}
    files = {name: sorted(entry) for name, entry in manifest["files"].items()}
    closed = report and report | {"metrics": _evaluated(report["metrics"])}
    return {"state": state, "report": closed, "header": header, "files": files, "skeleton": sorted(manifest["state"])}
