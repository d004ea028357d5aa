"""What the trainer costs: `fit` against a loop written by hand, in one process, in alternating blocks of steps.

    python bench/trainer.py [--pairs 200] [--steps 100]

Both train the same MLP, 64 wide, on the same loader with AdamW, clipping and a cosine schedule. `fit` also keeps its
metrics, its guard against NaN, its seeds, its deterministic mode and its checkpoints (one per epoch of 1000 steps);
the loop by hand has none of these. Every block of `fit` is followed by two blocks of the loop by hand: the first is
its pair, the second shows what the machine's noise alone does to such a ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

# Run as a script, this file's own directory comes first, and this file would be the `trainer` that is imported.
sys.path[0] = str(Path(__file__).parents[1])

from bench.machine import machine  # noqa: E402
from trainer import optim  # noqa: E402
from trainer.checkpoint import CheckpointStore  # noqa: E402
from trainer.config import TrainConfig  # noqa: E402
from trainer.data import Loader, TensorDataset  # noqa: E402
from trainer.loop import fit  # noqa: E402
from trainer.report import CONTINUE, CheckpointRef, Verdict  # noqa: E402
from trainer.schedule import schedule  # noqa: E402
from trainer.task import Loss, Task  # noqa: E402

SAMPLES, FEATURES, CLASSES, WIDTH, BATCH = 64_000, 32, 10, 64, 64


class Mlp(Task):
    """Two hidden layers of 64 on random data."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
        )

    def train_set(self) -> TensorDataset:
        return TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(CLASSES, (SAMPLES,)))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(cross_entropy(model(x), y, reduction="sum"), len(y))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"val/zero": 0.0}


def by_hand(config: TrainConfig) -> Iterator[None]:
    """The loop as one writes it; yields after every step."""
    task = Mlp(None)
    model = task.model()
    loader = Loader(task, config, torch.device("cpu"))
    optimizer = optim.build(config.optim, model)
    lr_at = schedule(config.schedule, optim.learning_rate(config.optim), config.num_epochs * loader.windows, 1)
    step = 0
    for epoch in range(config.num_epochs):
        for [(x, y)] in loader.epoch(epoch, 0):
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            yield


class Enough(Exception):
    """All blocks are measured."""


class Stopwatch:
    """A reporter that, every `steps` steps of the fit it watches, times the loop by hand for as many."""

    def __init__(self, config: TrainConfig, pairs: int, steps: int) -> None:
        self.loop = by_hand(config)
        self.pairs, self.steps, self.count = pairs, steps, 0
        self.seconds: list[tuple[float, float, float]] = []  # of each block: fit, by hand, by hand again
        self.started = time.perf_counter()

    @property
    def preempted(self) -> bool:
        if self.count % self.steps == 0:
            ours = time.perf_counter() - self.started
            self.seconds.append((ours, self._block(), self._block()))
            if len(self.seconds) > self.pairs:
                raise Enough
            self.started = time.perf_counter()
        self.count += 1
        return False

    def _block(self) -> float:
        torch.use_deterministic_algorithms(False)
        start = time.perf_counter()
        for _ in range(self.steps):
            next(self.loop)
        seconds = time.perf_counter() - start
        torch.use_deterministic_algorithms(True)
        return seconds

    def report(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        epoch: int | None = None,
        fold: int = 0,
        checkpoint: CheckpointRef | None = None,
    ) -> Verdict:
        return CONTINUE

    def event(self, kind: str, **fields: Any) -> None:
        raise AssertionError(kind)

    def artifact(self, path: Path, name: str | None = None) -> None:
        raise AssertionError(name)


def interval(ratios: np.ndarray, resamples: int = 10_000) -> str:
    """The median and its 95 % bootstrap interval."""
    draws = np.random.default_rng(0).choice(ratios, (resamples, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return f"{np.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    epochs = given.pairs * given.steps * 2 * BATCH // SAMPLES + 2
    config = TrainConfig.model_validate(
        {"num_epochs": epochs, "batch_size": BATCH, "schedule": {"name": "cosine", "warmup_ratio": 0.1}}
    )
    watch = Stopwatch(config, given.pairs, given.steps)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = CheckpointStore(Path(directory) / "checkpoints", fence=1)
        with contextlib.suppress(Enough):
            fit(Mlp(None), config, watch, checkpoints)
    ours, hand, again = np.array(watch.seconds[1:]).T  # the first block is the set-up
    print(f"{machine()}, torch {torch.__version__}")
    by_hand_us = 1e6 * np.median(hand) / given.steps
    print(f"{len(ours)} pairs of {given.steps} steps of {BATCH} samples; by hand {by_hand_us:.0f} us a step")
    print(f"speed of fit over by hand, median    {interval(hand / ours)}")
    print(f"by hand over itself, median          {interval(hand / again)}")
    print(f"speed of fit over by hand, all time  {hand.sum() / ours.sum():.3f}")


if __name__ == "__main__":
    main()
