"""What the ranks of a test do: fine-tune a small language model by `fit` and hand back every epoch's metrics."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hpo import load
from trainer.checkpoint.store import CheckpointStore
from trainer.loop import fit
from trainer.report import CONTINUE, Report

RECORDS = {"data.generated": 66}  # 53 to train on: four windows of an epoch, the last of which has 5 samples
CONFIG: dict[str, Any] = {
    "model.dropout": 0.0,
    "train.batch_size": 16,
    "train.num_epochs": 2,
    "train.optim.eps": 1e-4,  # so that no gradient's rounding becomes a whole step
}


def run(directory: str, study: str, **overrides: Any) -> list[dict[str, float]]:
    """Each epoch's losses and validation metrics."""
    drawn = {"evaluation.prompts": 4, "evaluation.best_of": 2} if study == "dpo" else {}
    records = RECORDS if study in ("lora", "dpo") else {}
    given = load(study).configure(CONFIG | records | drawn | overrides)
    metrics: list[dict[str, float]] = []

    def report(report: Report) -> Any:
        shown = report.metrics.items()
        metrics.append({name: value for name, value in shown if name.startswith(("train/loss", "val/"))})
        return CONTINUE

    reporter: Any = SimpleNamespace(
        preempted=False, report=report, event=lambda kind, **_: None, artifact=lambda *_: None
    )
    task = given.task_class()(given.config)
    outcome = fit(task, given.config.train, reporter, CheckpointStore(Path(directory), fence=1))
    assert outcome.kind == "complete", outcome
    return metrics


def runs(job: dict[str, Any]) -> dict[str, Any]:
    return {name: run(f"{job['directory']}/{name}", **given) for name, given in job["runs"].items()}
