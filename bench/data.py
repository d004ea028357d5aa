"""What reading costs: our loader workers against torch's DataLoader, in alternating epochs of one process.

    python bench/data.py [--rounds 7] [--workers 2]

Both read the same batches of 64 x 784 floats, a gather that takes some 20 us, so that what is seen is the way from a
worker to the training process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

# Run as a script, this file's own directory comes first, and this file would shadow modules of the same name.
sys.path[0] = str(Path(__file__).parents[1])

from bench.machine import machine  # noqa: E402
from trainer.data.workers import Request, Workers  # noqa: E402

BATCHES, BATCH, FEATURES = 400, 64, 784
REQUESTS: list[Request] = [(0, list(range(i, i + BATCH))) for i in range(BATCHES)]


class Images:
    """Answers a request, as torch's workers and ours ask."""

    def __init__(self) -> None:
        self.x = torch.randn(BATCHES + BATCH, FEATURES)

    def __call__(self, request: Request) -> Any:
        return (self.x[torch.tensor(request[1])],)

    def __getitem__(self, request: Request) -> Any:
        return self(request)


class Requests(Sampler):
    def __iter__(self) -> Iterator[Request]:
        return iter(REQUESTS)

    def __len__(self) -> int:
        return BATCHES


class One(DataLoader):
    """A DataLoader whose every sample is a whole batch already."""

    def __init__(self, workers: int) -> None:
        super().__init__(
            Images(),  # type: ignore[arg-type]
            batch_size=None,
            sampler=Requests(),
            num_workers=workers,
            persistent_workers=True,
        )


def epoch(start: Callable[[], Iterable[Any]]) -> float:
    """Microseconds per batch, after the first."""
    batches = iter(start())
    next(batches)
    begun = time.perf_counter()
    for _ in batches:
        pass
    return (time.perf_counter() - begun) / (BATCHES - 1) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    ours, torchs = Workers(Images(), given.workers, 60.0), One(given.workers)
    rounds = [(epoch(lambda: ours.map(REQUESTS)), epoch(lambda: torchs)) for _ in range(given.rounds)]
    ours.close()
    print(machine())
    for name, times in zip(("ours", "DataLoader"), zip(*rounds, strict=True), strict=True):
        print(f"{name:12} {statistics.median(times):8.0f} us per batch ({min(times):.0f} to {max(times):.0f})")
    ratios = [torchs / ours for ours, torchs in rounds]
    print(f"DataLoader / ours: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
