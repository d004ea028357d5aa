"""A training function in this process, with a reporter that answers as it is made to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpo import Choice, Float, Int, study
from trainer.checkpoint.store import CheckpointStore
from trainer.report import Outcome, Verdict

SPACE = {"lr": Float(1e-4, 1e-1, log=True), "width": Int(4, 64), "kind": Choice(["a", "b"])}


class Told:
    """A reporter that answers each epoch as it was made to, and keeps what it hears."""

    def __init__(self, verdicts: dict[int, str] | None = None, preempted: bool = False) -> None:
        self.verdicts, self.preempted = verdicts or {}, preempted
        self.reports: list[tuple[int, int | None, dict[str, float]]] = []
        self.committed: list[Any] = []
        self.artifacts: dict[str, bytes] = {}
        self.tags: dict[str, str] = {}

    def report(self, step, metrics, *, epoch=None, fold=0, checkpoint=None):
        self.reports.append((step, epoch, dict(metrics)))
        self.committed = [checkpoint, *self.committed] if checkpoint else self.committed
        return Verdict(self.verdicts.get(epoch, "continue"))

    def event(self, kind, **fields):
        pass

    def artifact(self, path, name=None):
        self.artifacts[name or path.name] = path.read_bytes()

    def tag(self, key, value):
        self.tags[key] = value


def fit(function: Any, directory: Path, told: Told, committed=(), **declared: Any) -> Outcome:
    """Train the middle of the space as a trial's attempt."""
    one = study(**({"space": SPACE, "minimize": "val/loss", "name": "mine"} | declared))(function)
    task = one.task_class()(one.config)
    return task.fit(told, CheckpointStore(directory, 1, committed))


def check_resumes(function: Any, directory: Path, cuts=(1, 2, 3), **declared: Any) -> list[tuple]:
    """Train to the end, and again with an interruption after each of these epochs: all that is reported must be the
    same, to the bit. What the training that nobody interrupted has reported."""
    whole = Told()
    assert fit(function, directory / "whole", whole, **declared).kind == "complete"
    for cut in cuts:
        first, rest = Told({cut: "leave"}), Told()
        assert fit(function, directory / str(cut), first, **declared).kind == "preempted"
        assert first.reports == whole.reports[: len(first.reports)] and first.reports[-1][1] == cut
        fit(function, directory / str(cut), rest, first.committed[:1], **declared)
        assert [*first.reports[:-1], *rest.reports] == whole.reports, f"cut after epoch {cut}"
    return whole.reports
