"""What gpt's mixtures of experts lose and gain on the generated corpus, over the plain model, by seeds of training.

    python bench/experts.py [--seeds 3] [--epochs 5] [--cells FILE]

The first mixtures have experts of half the plain model's width, of which a token meets two: as many active parameters
but for the router, and the same tokens. The second ones have experts of the whole width, so that a token meets nearly
twice the MLP, and as many tokens fewer as give the same operations, 6 for each active parameter and token. A row has
the mean of the best epochs' losses of the target domain over the seeds, their standard error, and the largest load of
an expert over the even one at the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Run as a script, this file's own directory comes first, and its trainer.py would be the `trainer` that is imported.
sys.path[0] = str(Path(__file__).parents[1])

from bench.cells import Cells  # noqa: E402
from bench.machine import machine  # noqa: E402
from studies.gpt.budget import active_parameters, flops, parameters  # noqa: E402
from studies.gpt.config import Config  # noqa: E402
from studies.gpt.task import GptTask  # noqa: E402
from trainer.checkpoint.store import CheckpointStore  # noqa: E402
from trainer.loop import fit  # noqa: E402
from trainer.report import Report, Silent, Verdict  # noqa: E402

WIDTH = 176  # of the plain model's MLP, as by default
KINDS: dict[
    str, tuple[dict[str, Any], bool]
] = {  # -> the model's fields, and whether it has the plain one's operations
    "dense": ({"mlp_size": WIDTH}, False),
    "4 experts, equal active": ({"mlp_size": WIDTH // 2, "moe": {"experts": 4, "top_k": 2}}, False),
    "8 experts, equal active": ({"mlp_size": WIDTH // 2, "moe": {"experts": 8, "top_k": 2}}, False),
    "4 experts, equal operations": ({"mlp_size": WIDTH, "moe": {"experts": 4, "top_k": 2}}, True),
    "8 experts, equal operations": ({"mlp_size": WIDTH, "moe": {"experts": 8, "top_k": 2}}, True),
}


class Kept(Silent):
    """A reporter that keeps the metrics of every epoch."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []

    def report(self, report: Report) -> Verdict:
        if report.epoch is not None:
            self.epochs.append(dict(report.metrics))
        return super().report(report)


def config_of(kind: str, seed: int, epochs: int) -> Config:
    fields, fewer = KINDS[kind]
    plain = Config.model_validate({"samples": {"tokens": 0}})
    train = plain.train.model_copy(update={"seed": seed, "num_epochs": epochs})
    dense = plain.model_copy(update={"train": train})
    given = dense.model_dump(mode="json")
    config = Config.model_validate(given | {"model": given["model"] | fields})
    if not fewer:
        return config
    tokens = len(GptTask(dense).rows) * epochs * dense.data.block_size
    active = active_parameters(config.model, config.data.vocab_size)
    per_parameter = tokens * active_parameters(dense.model, dense.data.vocab_size) / active**2
    return config.model_copy(update={"data": config.data.model_copy(update={"tokens_per_parameter": per_parameter})})


def trained(kind: str, seed: int, epochs: int) -> list[float]:
    """Returns the best loss of the target domain, the general one's at that epoch, the largest load, and the tokens."""
    config, reporter = config_of(kind, seed, epochs), Kept()
    with tempfile.TemporaryDirectory() as directory:
        fit(GptTask(config), config.train, reporter, CheckpointStore(Path(directory), fence=1))
    best, last = min(reporter.epochs, key=lambda epoch: epoch["val/loss"]), reporter.epochs[-1]
    load = last.get("val/expert_load_max", 1.0)
    return [best["val/loss"], best["val/general_loss"], load, last["budget/tokens"]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--cells", type=Path, help="keeps each training's figures, so that a stopped bench goes on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = Cells(options.cells)
    print(machine())
    print("| model | parameters | active | tokens | operations | `val/loss` | `val/general_loss` | largest load |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in KINDS:
        print(row(kind, options.seeds, options.epochs, cells), flush=True)


def row(kind: str, seeds: int, epochs: int, cells: Cells) -> str:
    def figures(seed: int) -> list[float]:
        return cells.get(f"{kind} {seed} {epochs}", lambda: trained(kind, seed, epochs))

    rows = np.array([figures(seed) for seed in range(seeds)])
    model, means, tokens = config_of(kind, 0, epochs).model, rows.mean(0), float(rows[0, 3])
    size, active = (count(model, 257) for count in (parameters, active_parameters))
    errors = rows.std(0, ddof=1) / seeds**0.5 if seeds > 1 else np.full(4, np.nan)
    losses = " | ".join(f"{means[i]:.3f} ± {errors[i]:.3f}" for i in (0, 1))
    sizes = f"{size:,} | {active:,} | {tokens:,.0f} | {flops(active, tokens):.3g}"
    return f"| {kind} | {sizes} | {losses} | {means[2]:.2f} |"


if __name__ == "__main__":
    main()
