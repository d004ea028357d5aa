"""What the ranks of a test do: train a small gpt by `fit` and hand back every epoch's metrics and the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from studies.gpt.config import Config
from studies.gpt.task import GptTask
from trainer.checkpoint.store import CheckpointStore, load
from trainer.loop import fit
from trainer.losses import vocabulary
from trainer.report import CONTINUE, Report

CONFIG: dict[str, Any] = {
    "data": {"corpus": {"general": 60, "target": 30}},
    "model": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "tie": False},
    "samples": {"prompts": ["a", ""], "tokens": 6, "temperature": 0.8},
    "train": {
        "num_epochs": 2,
        "batch_size": 12,
        "micro_batch_size": 3,
        "optim": {"name": "adamw", "lr": 3e-3, "eps": 1e-4},  # so that no gradient's rounding becomes a whole step
        "clip": {"norm": 0.5},
        "checkpoint": {"monitor": "val/loss"},
    },
}

MIXED: dict[str, Any] = {"moe": {"experts": 4, "top_k": 2, "capacity": 1.0, "shared": 1, "balance": 0.1}}


def run(
    directory: str,
    parallel: Mapping[str, Any],
    *,
    block: int | None = None,
    leave: bool = False,
    freeze: Mapping[str, Any] | None = None,
    **model: Any,
) -> dict[str, Any]:
    """Returns the metrics of the epochs, what the model wrote, and the weights at the end.

    With `block`, the model computes its loss itself, of so many tokens at a time. With `leave` the run is saved and
    left in the second epoch; another one in the directory goes on.
    """
    if block is not None:
        with patch.multiple(vocabulary, LARGE=1, _BLOCK=257 * block):
            return run(directory, parallel, leave=leave, freeze=freeze, **model)
    train = CONFIG["train"] | {"parallel": dict(parallel)} | ({"freeze": freeze} if freeze else {})
    given = CONFIG | {"train": train, "model": CONFIG["model"] | model}
    config = Config.model_validate(given)
    metrics: list[dict[str, float]] = []
    committed, written = [], {}

    def report(report: Report) -> Any:
        shown = report.metrics.items()
        metrics.append({name: value for name, value in shown if name.startswith(("train/loss", "val/"))})
        committed.extend([report.checkpoint] if report.checkpoint else [])
        reporter.preempted = leave
        return CONTINUE

    def artifact(path: Path, name: str | None = None) -> None:
        written[name] = path.read_text()

    reporter: Any = SimpleNamespace(preempted=False, report=report, event=lambda kind, **_: None, artifact=artifact)
    store = CheckpointStore(Path(directory), fence=1)
    outcome = fit(GptTask(config), config.train, reporter, store)
    state = load(committed[-1].path) if committed else {"model": {}}
    weights = {name: value.flatten().tolist() for name, value in state["model"].items()}
    return {"kind": outcome.kind, "metrics": metrics, "written": written, "weights": weights}


def runs(job: dict[str, Any]) -> dict[str, Any]:
    return {name: run(f"{job['directory']}/{name}", **given) for name, given in job["runs"].items()}
