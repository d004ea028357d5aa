"""How long training stands still for a checkpoint: one written in the background over one that is waited for.

    python bench/checkpoint.py [--megabytes 100 200 400] [--rounds 7] [--directory DIR] [--frozen]

The state is a model's weights and AdamW's two moments, in fp32. Rounds alternate between the two ways. While a save is
written in the background, steps of 10 matrix products are taken and compared with those taken in quiet, since the
thread may also slow them down. `fit` has the memory for copies made in the background after its first step; the first
save is shown with and without that. `--frozen`: instead, what five checkpoints take, and how long saves are, where all
but a hundredth of the weights is frozen.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

# Run as a script, this file's own directory comes first, and its trainer.py would be the `trainer` that is imported.
sys.path[0] = str(Path(__file__).parents[1])

from bench.machine import machine  # noqa: E402
from trainer.checkpoint.saver import Saver  # noqa: E402
from trainer.files.durable import on_disk  # noqa: E402

LAYER = 1024  # its weights are 4 MB


def state_of(megabytes: int) -> dict[str, object]:
    layers = max(1, round(megabytes / 3 / 4))
    weights = {f"{i}.weight": torch.randn(LAYER, LAYER) for i in range(layers)}
    moments = {name: {"exp_avg": 0.1 * w, "exp_avg_sq": w.square()} for name, w in weights.items()}
    return {"model": weights, "optimizer": {"of": "AdamW", "state": moments}, "step": 1}


def step(a: torch.Tensor) -> float:
    began = time.perf_counter()
    for _ in range(10):
        _ = a @ a
    return time.perf_counter() - began


def stall(saver: Saver, state: dict[str, object], steps: list[float], *, background: bool) -> float:
    """Seconds for which one save holds up its caller; `steps` takes the times of those taken while it is written."""
    a = torch.randn(256, 256)
    before = saver.seconds
    saver.start(state, step=1, epoch=0, metrics={}, background=background)
    while background and not saver.ready:
        steps.append(step(a))
    ref = saver.finish()
    assert ref is not None
    shutil.rmtree(ref.path)
    return saver.seconds - before


def frozen(megabytes: int, directory: Path) -> None:
    """Prints the bytes of five checkpoints over those of their directories apart, and their times."""
    base = {f"{i}.weight": nn.Parameter(torch.randn(LAYER, LAYER), requires_grad=False) for i in range(megabytes // 4)}
    state = state_of(3 * megabytes // 100)
    small = state_of(3 * megabytes // 100)["model"]
    assert isinstance(small, dict)
    state["model"] = {**base, **{f"adapter.{key}": nn.Parameter(w) for key, w in small.items()}}
    saver, seconds, refs = Saver(directory, 1, ""), [], []
    for step in range(5):
        before = saver.seconds
        saver.start(state, step=step, epoch=0, metrics={}, background=False)
        refs.append(saver.finish())
        seconds.append(saver.seconds - before)
    held = {file: size for ref in refs for file, size in on_disk(ref.path).items()}
    print(
        f"{megabytes} MB frozen: five checkpoints take {sum(held.values()) / 1e6:.0f} MB on the disk, their "
        f"directories {sum(ref.size for ref in refs) / 1e6:.0f} MB; the first save {seconds[0]:.2f} s, the others "
        f"{np.median(seconds[1:]):.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 200, 400])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; default the system's")
    parser.add_argument("--frozen", action="store_true", help="of a model that is all but frozen")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}, torch {torch.__version__}")
    a = torch.randn(256, 256)
    if given.frozen:
        for megabytes in given.megabytes:
            with tempfile.TemporaryDirectory(dir=given.directory) as directory:
                frozen(megabytes, Path(directory))
        return
    for megabytes in given.megabytes:
        state, steps = state_of(megabytes), []
        quiet = [step(a) for _ in range(200)]
        with tempfile.TemporaryDirectory(dir=given.directory) as directory:
            unprepared = Saver(Path(directory), 1, "")
            cold = stall(unprepared, state, [], background=True)
            unprepared.close()
            saver = Saver(Path(directory), 1, "")
            saver.reserve(state)
            time.sleep(megabytes / 100)
            first = stall(saver, state, [], background=True)
            rounds = [
                [stall(saver, state, steps, background=way) for way in (False, True)] for _ in range(given.rounds)
            ]
            saver.close()
        waited, background = np.array(rounds).T
        ratios = background / waited
        print(
            f"{megabytes} MB: stall {np.median(ratios):.3f} of a save that is waited for "
            f"({ratios.min():.3f} to {ratios.max():.3f}; the first {first / np.median(waited):.3f}, "
            f"unprepared {cold / np.median(waited):.3f}; "
            f"that save {np.median(waited):.2f} s); a step meanwhile {np.median(steps) / np.median(quiet):.2f} times "
            "one in quiet"
        )


if __name__ == "__main__":
    main()
