"""How fast the large studies train on this device: samples and tokens per second, model FLOPs utilisation, the share of
the time spent waiting for data, peak of memory, and the three dearest operations.

    python bench/throughput.py [--study atft|gpt] [--preset full] [--steps 30] [--peak-tflops 989.4] [-o path=value]...

Each study's own task and data, in the trainer's own steps, at its preset `full` and the precision that the trainer
chooses for the device. Without a GPU leave the preset out (`--preset none`) and give a peak. Needs torch and what the
trainer and the studies' data need; nothing of Optuna, MLflow or SQL.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

# Run as a script, this file's own directory comes first, which would hide the package trainer behind bench/training.py.
sys.path[0] = str(Path(__file__).parents[1])

from bench.machine import machine  # noqa: E402
from bench.training import wait  # noqa: E402
from hpo import load  # noqa: E402
from hpo.space.config import parse_override  # noqa: E402
from trainer.diagnose.profile import Cost, profiled  # noqa: E402
from trainer.diagnose.trial import Steps, fresh  # noqa: E402
from trainer.optim import build as optim  # noqa: E402

WARM_UP = 5  # steps: compiling, choosing kernels, filling caches


def measure(study: str, overrides: dict[str, object], steps: int) -> None:
    """Train `steps` windows after a warm-up, print the rates; then five more, for the profile."""
    declared = load(study).configure(overrides)
    config: Any = declared.build({})
    task = declared.task_class()(config)
    with fresh(task, config.train) as fit, tempfile.TemporaryDirectory() as scratch:
        train, cuda = fit.config, fit.device.type == "cuda"
        taken, lr = Steps(fit, WARM_UP + steps + 5), optim.learning_rate(train.optim)
        for _ in range(WARM_UP):
            taken.take(lr)
        fit.stepper.drain()
        taken.waited = 0.0
        wait()
        start, counted = time.perf_counter(), fit.state.meter.sums.get("count", 0.0)
        for _ in range(steps):
            taken.take(lr)
        fit.stepper.drain()
        wait()
        seconds = time.perf_counter() - start
        samples = steps * train.batch_size / seconds
        name = torch.cuda.get_device_name() if cuda else "CPU"
        size = sum(p.numel() for p in fit.state.model.parameters())
        print(f"{study} on {name}, torch {torch.__version__}, {train.precision}, {size / 1e6:.1f} M parameters")
        print(f"  {samples:.2f} samples/s, {1000 * seconds / steps:.1f} ms a step of {train.batch_size}")
        if task.unit != "samples":
            print(f"  {(fit.state.meter.sums.get('count', 0.0) - counted) / seconds:.0f} {task.unit}/s")
        if train.peak_tflops is not None:
            from trainer.metrics.flops import full_rate

            print(f"  MFU {samples / full_rate(task, train, train.peak_tflops, fit.device, fit.loader):.1%}")
        print(f"  {taken.waited / seconds:.1%} of the time waiting for data")
        if cuda:
            print(f"  peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
        _print(profiled(lambda: taken.take(lr), 5, Path(scratch) / "trace.json"))


def _print(costs: list[Cost]) -> None:
    for cost in costs[:3]:
        print(f"  {cost.share:6.1%}  {cost.ms:8.2f} ms a step  {cost.name}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--study", action="append", help="atft, gpt or another; both where none is given")
    parser.add_argument("--preset", default="full", help="of the study; none for its defaults")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--peak-tflops", default="auto", help="of the device; none where the MFU is not wanted")
    parser.add_argument("-o", action="append", default=[], dest="overrides", metavar="path=value")
    given = parser.parse_args()
    print(machine())
    overrides: dict[str, object] = dict(map(parse_override, given.overrides))
    overrides |= {} if given.preset == "none" else {"preset": given.preset}
    overrides |= {} if given.peak_tflops == "none" else {"train.peak_tflops": given.peak_tflops}
    for study in given.study or ["atft", "gpt"]:
        measure(study, overrides, given.steps)


if __name__ == "__main__":
    main()
