"""What the ranks of a test do: train a small mlp by `fit` and hand back its metrics and weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_runs import MemoryReporter

from studies.mlp.config import Config
from studies.mlp.task import MlpTask
from trainer.checkpoint.store import CheckpointStore, load
from trainer.loop import fit

TRAIN: dict[str, Any] = {"num_epochs": 2, "batch_size": 128, "micro_batch_size": 32, "clip": {"norm": 0.5}}
TRAIN["optim"] = {"name": "sgd", "lr": 0.1}


def run(directory: str, parallel: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    given = {"model": {"hidden_size": 16, "num_layers": num_layers, "dropout": 0.0}}
    config = Config.model_validate(given | {"train": TRAIN | {"parallel": dict(parallel)}})
    reporter = MemoryReporter()
    outcome = fit(MlpTask(config), config.train, reporter, CheckpointStore(Path(directory), fence=1))
    newest = max(Path(directory).glob("step-*"))
    metrics = {f"{step} {name}": value for (step, name), value in reporter.values.items() if "/loss" in name}
    weights = {name: value.flatten().tolist() for name, value in load(newest)["model"].items()}
    return {"kind": outcome.kind, "metrics": metrics, "weights": weights}


def runs(job: dict[str, Any]) -> dict[str, Any]:
    return {name: run(f"{job['directory']}/{name}", **given) for name, given in job["runs"].items()}
