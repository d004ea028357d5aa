"""Trials that train as lanes of one group, each beside the run of its own that it must equal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainer_runs import Trial

from trainer.checkpoint.store import CheckpointStore
from trainer.config import Frozen, TrainConfig
from trainer.data import TensorDataset
from trainer.errors import Fenced
from trainer.lanes.group import Group
from trainer.lanes.lane import Lane
from trainer.report import Outcome, Report, Reporter, Verdict
from trainer.task import Loss, Task

SAMPLES = 36


EPOCH = 3  # windows: in batches of 16, the last of 4


LRS = (0.3, 0.01, 0.1, 0.002, 0.03, 0.7)  # whoever has the last one learns nothing of use, which is no matter here


class Whole(Frozen):
    """What a study's configuration is to its task."""

    train: TrainConfig
    dropout: float = 0.4
    weight: float = 1.0
    hidden: float = 1.0  # in no task's lane_fields


class Small(Task):
    """SAMPLES of 6 features in 3 classes, in float64: what is computed in another order differs by 1e-16, and what
    is computed otherwise by more."""

    dtype = torch.float64
    lane_fields = ("dropout", "weight")

    def model(self) -> nn.Module:
        self.net = self.layers().to(self.dtype)
        return self.net

    def layers(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 8), nn.GELU(), nn.Linear(8, 3))

    def train_set(self) -> TensorDataset:
        x = torch.randn(SAMPLES, 6, dtype=self.dtype)
        return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x).to(self.dtype), y, reduction="sum"), len(y))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        x = torch.randn(20, 6, dtype=self.dtype).to(next(model.parameters()).device)
        return {"val/loss": F.cross_entropy(model(x), torch.arange(20, device=x.device) % 3).item()}


class OneOf(Trial):
    """A trial that can train in a group, or by `fit`; `of` has the values of its own beside `train`."""

    def __init__(
        self,
        directory: Path,
        task: type[Task] = Small,
        verdict: Callable[..., Verdict] | None = None,
        of: Mapping[str, float] = {},
        **config: Any,
    ) -> None:
        base: dict[str, Any] = {"batch_size": 16, "micro_batch_size": None, "lanes": 1000, "checkpoint": {}}
        base |= {"precision": "fp32"}  # on a GPU too: of what is in float64 the digits are compared
        super().__init__(directory, task, verdict, **(base | config))
        whole = Whole(train=self.config, **of)
        self.task_class: Any = lambda _: task(whole)
        self.outcome: Outcome | BaseException | None = None

    def enter(self, group: Group, cut: Callable[[int], bool] | None = None) -> Lane:
        r = self.reporter
        r.fence, r.reads, r.cut = r.fence + 1, 0, cut or (lambda read: False)
        self.task, self.outcome = self.task_class(None), None
        self.store = CheckpointStore(self.directory, r.fence, list(r.committed), on_change=r.changed)
        return group.admit(self.task, self.config, r, self.store)

    def kind(self) -> str:
        assert isinstance(self.outcome, Outcome), self.outcome
        return self.outcome.kind

    def numbers(self) -> dict[tuple[int, str], float]:
        """All that it has reported, but for clocks."""
        values = self.reporter.values.items()
        return {key: v for key, v in values if not key[1].startswith("time/") and not key[1].endswith("per_sec")}

    def saved(self) -> dict[str, Any]:
        """Its newest checkpoint, but for what was reported with it."""
        found = CheckpointStore(self.directory, 99, list(self.reporter.committed)).load_latest()
        assert found is not None
        return {key: value for key, value in found[0].items() if key != "report"}

    def bits(self) -> str:
        """Of every value reported and of its newest checkpoint."""
        numbers = [(step, key, value.hex()) for (step, key), value in sorted(self.numbers().items())]
        return hashlib.sha256(repr((numbers, self.reporter.epochs, plain(self.saved()))).encode()).hexdigest()


def plain(state: Any) -> Any:
    """The state with the bits of its tensors, in the order of the keys."""
    if isinstance(state, Tensor):
        return str(state.dtype), tuple(state.shape), state.detach().contiguous().numpy().tobytes()
    if isinstance(state, Mapping):
        return [(key, plain(state[key])) for key in sorted(state)]
    if isinstance(state, (list, tuple)):
        return [plain(one) for one in state]
    return state


def each(reports: Sequence[tuple[Reporter, Report]], wait: bool) -> list[Any]:
    """A commit that asks one reporter after another."""
    answers: list[Any] = []
    for reporter, report in reports:
        try:
            answers.append(reporter.report(report))
        except Fenced as error:
            answers.append(error)
    return answers


def together(
    *trials: OneOf,
    cuts: Mapping[OneOf, Callable[[int], bool]] = {},
    commit: Callable[..., Any] = each,
    later: Mapping[int, Sequence[OneOf]] = {},
) -> None:
    """Train them as one group to their ends; those of `later` are admitted once so many epochs have passed."""
    with Group(trials[0].config, commit) as group:
        lanes = {trial.enter(group, cuts.get(trial)): trial for trial in trials}
        passed = 0
        while group.lanes or any(at >= passed for at in later):
            for lane, how in group.advance():
                lanes[lane].outcome = how
            passed += 1
            lanes |= {trial.enter(group, cuts.get(trial)): trial for trial in later.get(passed, ())}


def alone(directory: Path, *args: Any, **config: Any) -> OneOf:
    """The same trial as the only lane."""
    trial = OneOf(directory, *args, **config)
    together(trial)
    return trial


def solo(directory: Path, *args: Any, **config: Any) -> OneOf:
    """The same trial by `fit`."""
    trial = OneOf(directory, *args, **config)
    trial.outcome = trial.attempt()
    return trial


def leaves(state: Any, path: str = "") -> dict[str, Any]:
    if isinstance(state, Mapping):
        return {k: v for key, value in state.items() for k, v in leaves(value, f"{path}/{key}").items()}
    if isinstance(state, (list, tuple)):
        return {k: v for i, value in enumerate(state) for k, v in leaves(value, f"{path}/{i}").items()}
    return {path: state}


def assert_close(lane: OneOf, oracle: OneOf, rtol: float = 1e-9) -> None:
    """The same outcome, reports and checkpoint, but for rounding."""
    assert lane.outcome == oracle.outcome
    assert lane.reporter.epochs == oracle.reporter.epochs
    assert lane.numbers() == pytest.approx(oracle.numbers(), rel=rtol, abs=rtol, nan_ok=True)
    mine, theirs = leaves(lane.saved()), leaves(oracle.saved())
    assert mine.keys() == theirs.keys()
    for path, value in theirs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            torch.testing.assert_close(mine[path], value, rtol=rtol, atol=rtol, msg=lambda m, at=path: f"{at}: {m}")
        elif isinstance(value, float):
            assert mine[path] == pytest.approx(value, rel=rtol, abs=rtol, nan_ok=True), path
        else:
            assert plain(mine[path]) == plain(value), path


class Cut(Small):
    """All that keeps a state or draws."""

    dtype = torch.float32

    def layers(self) -> nn.Module:
        rate = self.config.dropout
        return nn.Sequential(nn.Linear(6, 13), nn.BatchNorm1d(13), nn.ReLU(), nn.Dropout(rate), nn.Linear(13, 3))

    def augment(self, sample: Any, generator: torch.Generator) -> Any:
        x, y = sample
        return x + 0.1 * torch.randn(x.shape, generator=generator), y


CUTS: dict[str, Any] = {
    "task": Cut,
    "num_epochs": 2,
    "micro_batch_size": 9,
    "average": {"name": "ema", "decay": 0.8},
    "optim": {"lr": 0.01, "wrap": "lookahead", "lookahead": {"k": 2}},
    "schedule": {"name": "cosine", "warmup_steps": 3},
}
