"""What the ranks of a test do: train a small atft by `fit` and hand back the metrics of its epoch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from studies.atft.config import Config
from studies.atft.task import AtftTask
from trainer.checkpoint.store import CheckpointStore
from trainer.loop import fit
from trainer.report import CONTINUE, Report

CONFIG: dict[str, Any] = {
    "data": {
        "market": {"num_days": 240, "num_stocks": 24},
        "split": {"val_days": 20, "test_days": 10, "min_train_days": 20},
        "min_stocks": 10,
    },
    "model": {"hidden_size": 8, "num_heads": 2, "num_layers": 1, "dropout": 0.0},
    # eps: no gradient's rounding becomes a whole step.
    "train": {"num_epochs": 1, "batch_size": 2, "optim": {"name": "adamw", "lr": 3e-3, "eps": 1e-4}},
}


def run(directory: str, parallel: Mapping[str, Any], **model: Any) -> dict[str, float]:
    """The epoch's losses and validation metrics."""
    given = CONFIG | {"train": CONFIG["train"] | {"parallel": dict(parallel)}, "model": CONFIG["model"] | model}
    config = Config.model_validate(given)
    found: dict[str, float] = {}

    def report(report: Report) -> Any:
        found.update({name: value for name, value in report.metrics.items() if name.startswith(("train/loss", "val/"))})
        return CONTINUE

    reporter: Any = SimpleNamespace(preempted=False, report=report, event=lambda kind, **_: None)
    outcome = fit(AtftTask(config), config.train, reporter, CheckpointStore(Path(directory), fence=1))
    assert outcome.kind == "complete", outcome
    return found


def runs(job: dict[str, Any]) -> dict[str, Any]:
    return {name: run(f"{job['directory']}/{name}", **given) for name, given in job["runs"].items()}
