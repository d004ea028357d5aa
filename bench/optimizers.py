"""What a step of each optimizer costs, over that of AdamW on the same parameters, in alternating blocks.

    python bench/optimizers.py [--width 64] [--rounds 15] [--steps 20]

The parameters are those of a perceptron with two hidden layers; gradients are fixed and no model is run, so this is the
optimizer alone, each of its implementations by itself. Sophia's looks at the curvature, and SAM's and Lookahead's share
of a step, are passes of the model and copies, and not in it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

# Run as a script, this file's own directory comes first, and its trainer.py would be the `trainer` that is imported.
sys.path[0] = str(Path(__file__).parents[1])

from trainer.config.optim import OPTIMIZERS, OptimConfig  # noqa: E402
from trainer.optim import build as optim  # noqa: E402


def built(name: str, way: str, width: int) -> Optimizer:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    return optim.build(OptimConfig.model_validate({"name": name, "implementation": way}), net)


def seconds(optimizer: Optimizer, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    ways = [(name, way) for name, known in OPTIMIZERS.items() for way in known.runs_as]
    optimizers = {way: built(*way, given.width) for way in ways}
    reference = optimizers["adamw", "fused"]
    rounds = [
        [(seconds(optimizer, given.steps), seconds(reference, given.steps)) for optimizer in optimizers.values()]
        for _ in range(given.rounds + 1)
    ][1:]  # the first makes the state
    times = np.array(rounds)  # [rounds, optimizers, (itself, reference)]
    print(f"fused AdamW: {1e6 * np.median(times[..., 1]) / given.steps:.0f} us a step, width {given.width}")
    for (name, way), ratio in zip(ways, np.median(times[..., 0] / times[..., 1], axis=0), strict=True):
        print(f"{name:<10} {way:<8} {ratio:6.2f}")


if __name__ == "__main__":
    main()
