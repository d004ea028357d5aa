"""What lanes save: a step of K trials as lanes of one model against K steps of the loop by hand, and of `fit`.

    python bench/lanes.py [--widths 32 64 128 256] [--lanes 2 4 8 16 32 64] [--pairs 30] [--steps 20] [--device cpu]

The MLP and the loops of bench/training.py, at several widths, in batches of 64: every block of so many steps of the
group is followed by one of the loop by hand and one of `fit`, in one process and on one thread. Printed is the time of
trials one after the other over that of the group, the median and its 95 % interval.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Run as a script, this file's own directory comes first, and bench/training.py would be the `trainer` that is imported.
sys.path[0] = str(Path(__file__).parents[1])

from bench import training as base  # noqa: E402
from bench.machine import machine  # noqa: E402
from bench.training import Enough, Stopwatch, Watched, by_hand, interval  # noqa: E402
from trainer.checkpoint.store import CheckpointStore  # noqa: E402
from trainer.config import TrainConfig  # noqa: E402
from trainer.lanes.group import Group  # noqa: E402
from trainer.loop import fit  # noqa: E402
from trainer.report import Report, Silent  # noqa: E402


class Handed(Silent):
    """Lets another thread run `fit` a step at a time, in turns with its own."""

    def __init__(self) -> None:
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)

    @property
    def preempted(self) -> bool:
        self.done.release()
        self.go.acquire()
        return False


def by_fit(config: TrainConfig) -> Iterator[None]:
    """`fit`, which yields after every step: in a thread that runs only while it is waited for."""
    turns = Handed()

    def train() -> None:
        with tempfile.TemporaryDirectory() as directory:
            fit(base.Mlp(None), config, turns, CheckpointStore(Path(directory) / "checkpoints", fence=1))

    threading.Thread(target=train, daemon=True).start()
    turns.done.acquire()
    while True:
        turns.go.release()
        turns.done.acquire()
        yield


def group(configs: Sequence[TrainConfig], watch: Stopwatch) -> None:
    def commit(reports: Sequence[tuple[Any, Report]], wait: bool) -> list[Any]:
        return [reporter.report(report) for reporter, report in reports]

    with tempfile.TemporaryDirectory() as directory, Group(configs[0], commit) as lanes:
        for number, config in enumerate(configs):
            store = CheckpointStore(Path(directory) / str(number), fence=1)
            lanes.admit(base.Mlp(None), config, Silent() if number else Watched(watch), store)
        while lanes.lanes:
            for _, ended in lanes.advance():
                if isinstance(ended, BaseException):
                    raise ended


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--lanes", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{machine()}, torch {torch.__version__}; {given.pairs} pairs of {given.steps} steps of {base.BATCH} samples")
    print("| width | lanes | by hand, us a step | a lane's step, us | by hand / lanes | fit / lanes |")
    print("|---" * 6 + "|")
    for width in given.widths:
        base.WIDTH = width
        for lanes in given.lanes:
            plain = {"device": given.device, "precision": "fp32", "num_epochs": 20, "batch_size": base.BATCH}
            plain |= {"schedule": {"name": "cosine", "warmup_ratio": 0.1}}
            config = TrainConfig.model_validate(plain)
            rates = np.geomspace(1e-4, 1e-2, lanes)
            configs = [TrainConfig.model_validate({**plain, "lanes": lanes, "optim": {"lr": lr}}) for lr in rates]
            watch = Stopwatch([by_hand(config), by_fit(config)], given.pairs, given.steps)
            with suppress(Enough):
                group(configs, watch)
            own, hand, alone = watch.blocks().T
            each = 1e6 * np.median(own) / given.steps / lanes
            print(
                f"| {width} | {lanes} | {1e6 * np.median(hand) / given.steps:.0f} | {each:.0f} | "
                f"{interval(lanes * hand / own)} | {interval(lanes * alone / own)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
