"""What a gpt trained on rows of 256 tokens loses on rows of 2,048, by its positions, as it is and trained on there.

    python bench/long_context.py [--seeds 1] [--epochs 8] [--more 2] [--cells FILE]

The generated documents define six keys at their start and repeat each later (studies/_lm/source.py). Those of the
first training have 28 words and fit 256 tokens; those it continues on have 280 of the same language, and a digit may
lie 2,000 tokens after its definition. A row has the loss of the target domain in nats per token, for tokens from the
128th, 256th, 512th and 1,024th position of their document to twice as far, and the loss of the digits from the 1,024th
on, of which a uniform guess costs 2.30: on the weights of the first training as they are, then after it continued.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Run as a script, this file's own directory comes first, and its trainer.py would be the `trainer` that is imported.
sys.path[0] = str(Path(__file__).parents[1])

from bench.cells import Cells  # noqa: E402
from bench.experts import Kept  # noqa: E402
from bench.machine import machine  # noqa: E402
from studies.gpt.config import Config  # noqa: E402
from studies.gpt.task import GptTask  # noqa: E402
from trainer.checkpoint.store import CheckpointStore  # noqa: E402
from trainer.loop import fit  # noqa: E402

SHORT, LONG = 256, 2048
CORPORA = {
    SHORT: {"general": 500, "target": 1500, "words": 28, "keys": 6},
    LONG: {"general": 40, "target": 120, "words": 280, "keys": 6},
}
BATCH = {SHORT: 8, LONG: 2}  # rows
KINDS: dict[str, dict[str, Any]] = {
    "rotary, as trained": {},
    "rotary, a window of 256": {"window": SHORT},
    "rotary, a window of 256 and 32 sinks": {"window": SHORT, "sinks": 32},
    "position interpolation": {"scaling": "linear", "trained": SHORT},
    "NTK-aware": {"scaling": "ntk", "trained": SHORT},
    "YaRN": {"scaling": "yarn", "trained": SHORT},
    "ALiBi": {"kind": "alibi"},
}
FIGURES = [*(f"val/loss_from_{start}" for start in (128, 256, 512, 1024)), "val/digits_from_1024"]


class Continued(GptTask):
    """The gpt, from the weights of an earlier training."""

    weights: dict[str, Tensor]

    def model(self) -> nn.Module:
        model = super().model()
        model.load_state_dict(self.weights)
        return model


def config_of(length: int, position: dict[str, Any], seed: int, epochs: int, lr: float) -> Config:
    given = Config().model_dump(mode="json")
    given["data"] |= {"block_size": length, "corpus": CORPORA[length], "by_position": True}
    given["model"] |= {"position": position}
    given["samples"]["tokens"] = 0
    given["train"] |= {"seed": seed, "num_epochs": epochs, "batch_size": BATCH[length]}
    given["train"]["optim"]["lr"] = lr
    return Config.model_validate(given)


def weights(task: GptTask) -> dict[str, Tensor]:
    """Returns the weights after a training of the task."""
    with tempfile.TemporaryDirectory() as directory:
        store = CheckpointStore(Path(directory), fence=1)
        fit(task, task.config.train, Kept(), store)
        latest = store.load_latest()
    assert latest is not None
    return latest[0]["model"]


def figures(kind: str, base: dict[str, Tensor], seed: int, epochs: int) -> list[float]:
    """Returns `FIGURES` before and after the training continues."""
    config, reporter = config_of(LONG, KINDS[kind], seed, epochs, 1e-3), Kept()
    task = Continued(config)
    task.weights = base
    with torch.no_grad():
        before = task.evaluate(task.model().eval())
    with tempfile.TemporaryDirectory() as directory:
        fit(task, config.train, reporter, CheckpointStore(Path(directory), fence=1))
    return [metrics[name] for metrics in (before, reporter.epochs[-1]) for name in FIGURES]


def row(kind: str, means: np.ndarray, errors: np.ndarray) -> str:
    cells = [
        f"{mean:.3f}" + (f" ± {error:.3f}" if error == error else "") for mean, error in zip(means, errors, strict=True)
    ]
    return f"| {kind} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=8, help="of the first training")
    parser.add_argument("--more", type=int, default=2, help="epochs after it")
    parser.add_argument("--cells", type=Path, help="keeps each training's figures, so that a stopped bench goes on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells, bases = Cells(options.cells), dict[tuple[str, int], dict[str, Tensor]]()
    print(machine())
    starts = ["128", "256", "512", "1,024", "digits"]
    print("| positions | " + " | ".join(f"{when} {start}" for when in ("before:", "after:") for start in starts) + " |")
    print("|---" * 11 + "|")

    def base(kind: str, seed: int) -> dict[str, Tensor]:
        key = ("alibi" if kind == "ALiBi" else "rotary", seed)
        if key not in bases:
            bases[key] = weights(GptTask(config_of(SHORT, {"kind": key[0]}, seed, options.epochs, 3e-3)))
        return bases[key]

    for kind in KINDS:
        rows = np.array(
            [
                cells.get(
                    f"{kind} {seed} {options.epochs} {options.more}",
                    lambda kind=kind, seed=seed: figures(kind, base(kind, seed), seed, options.more),
                )
                for seed in range(options.seeds)
            ]
        )
        errors = rows.std(0, ddof=1) / len(rows) ** 0.5 if len(rows) > 1 else np.full(rows.shape[1], np.nan)
        print(row(kind, rows.mean(0), errors), flush=True)


if __name__ == "__main__":
    main()
