"""Measures what the trainer makes of one GPU: language models, small models, convolutions, lanes, saves, resumes.

    python bench/gpu.py [--only ROW]... [--minutes 8] [--profile] [--device cuda]

Each row runs in a process of its own, within its time limit, and is printed when it is measured; the rows come in the
order of their worth, so what the minutes do not reach is the least. Needs torch (2.11 or later), numpy, pydantic,
PyYAML and this tree; nothing of Optuna, MLflow or SQL. `--device cpu` runs the same rows, small, to try the script.

The share of the arithmetic that a language model uses (MFU) is, for every kernel,

    tokens/s * (6 N + 12 layers width mean(i)) / peak

with N the parameters, the tied embedding once; i the place of a token within its document, counted from 1, since causal
attention inside documents multiplies it with i keys (forward once, backward twice); and tokens those of documents,
without padding. The old count, of all [length, length] scores, stands beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Run as a script, this file's own directory comes first, which would hide the package trainer behind bench/training.py.
sys.path[0] = str(Path(__file__).parents[1])

from bench.machine import machine  # noqa: E402
from bench.training import Enough, Stopwatch, by_hand, interval, ours, wait  # noqa: E402
from studies.gpt import STUDY  # noqa: E402
from studies.gpt.budget import parameters  # noqa: E402
from studies.gpt.config import Config  # noqa: E402
from studies.gpt.task import GptTask  # noqa: E402
from trainer.checkpoint.store import CheckpointStore  # noqa: E402
from trainer.config import TrainConfig  # noqa: E402
from trainer.data import Mixture, Packed  # noqa: E402
from trainer.diagnose.trial import Steps, fresh  # noqa: E402
from trainer.loop import Fit, fit  # noqa: E402
from trainer.memory.estimate import estimate  # noqa: E402
from trainer.metrics.flops import PEAKS  # noqa: E402
from trainer.optim import build as optim  # noqa: E402
from trainer.report import Silent  # noqa: E402

WARM_UP, STEPS = 5, 15
WEB = 6.0, 1.0  # mean and deviation of the logarithm of a document's tokens: a median of 403, a mean of 665


class Documents:
    """Random tokens in `count` documents of log-normal lengths, or, without a `spread`, all of `length` tokens."""

    draws = False

    def __init__(self, count: int, vocab_size: int, length: int, spread: bool) -> None:
        draws = np.random.default_rng(0)
        of_web = np.exp(draws.normal(*WEB, count)).astype(int).clip(8, 8 * length)
        self.lengths = of_web if spread else np.full(count, length)
        self.tokens = torch.from_numpy(draws.integers(vocab_size, size=int(self.lengths.sum())))
        self.begins = np.cumsum(self.lengths) - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[self.begins[index] : self.begins[index] + self.lengths[index]]


class Rows(GptTask):
    """The gpt study's task on random documents, packed as its own."""

    packed = True
    count = 6000

    @cached_property
    def rows(self) -> Mixture:
        length = self.data.block_size
        documents = Documents(self.count, self.data.vocab_size, length, self.packed)
        return Mixture([(Packed(documents, length, begins=self.begins), 1.0)])

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        return {"val/loss": 0.0}


def attended(rows: Mixture) -> tuple[float, float]:
    """Returns the mean place of a token within its document, and the share of a row that is no padding."""
    [packed] = rows.sources
    sizes = packed._sizes.astype(float)
    return float((sizes * (sizes + 1) / 2).sum() / sizes.sum()), float(sizes.sum() / (len(packed) * packed.length))


SIZES = {
    "124M": {},
    "350M": {"hidden_size": 1024, "num_layers": 24, "num_heads": 16, "num_kv_heads": 16},
    "small": {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1},
}


def gpt_config(size: str, rows: int, device: str, **train: Any) -> Config:
    full = STUDY.configure({"preset": "full"}).config
    assert isinstance(full, Config)
    given = full.model_dump()
    given["model"] |= SIZES[size]
    given["data"] |= {"tokens_per_parameter": None}
    if size == "small":
        given["data"] |= {"vocab_size": 512, "block_size": 256}
    given["train"] |= {"device": device, "num_epochs": 1, "batch_size": rows, "micro_batch_size": rows, **train}
    return Config.model_validate(given)


def gpt(size: str, packed: bool, compiled: bool, given: Given) -> None:
    """Prints the rates of steps of 65,536 tokens (32,768 of the larger model), each one micro-batch."""
    small = given.device == "cpu"
    size = "small" if small else size
    config = gpt_config(size, 2 if small else 32 if size == "350M" else 64, given.device, compile=compiled)
    task = Rows(config)
    task.packed = packed
    began = time.perf_counter()
    with fresh(task, config.train) as run:
        steps = Steps(run, WARM_UP + 2 * STEPS)
        lr = optim.learning_rate(config.train.optim)
        for _ in range(WARM_UP):
            steps.take(lr)
        run.stepper.drain()
        wait()
        start_up, steps.waited = time.perf_counter() - began, 0.0
        start = time.perf_counter()
        for _ in range(STEPS):
            steps.take(lr)
        run.stepper.drain()
        wait()
        seconds = time.perf_counter() - start
        report(task, run, config, seconds, steps.waited / seconds, start_up)
        if not compiled:
            print(
                f"    {estimate(copy.copy(task), run.config, run.loader.first()).peak / 2**30:.1f} GiB by the estimate"
            )
        if given.profile:
            profile(lambda: steps.take(lr))


def profile(step: Callable[[], object], steps: int = 3) -> None:
    """Prints the kernels that take longest, and how much of a step they fill."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    start = time.perf_counter()
    with torch.profiler.profile(activities=activities, acc_events=True) as seen:
        for _ in range(steps):
            step()
        wait()
        seconds = time.perf_counter() - start
    kernels: dict[str, float] = {}
    for event in seen.key_averages():
        if event.device_type.name == "CUDA":
            kernels[event.key] = kernels.get(event.key, 0.0) + event.self_device_time_total / 1000 / steps
    written = sum(ms for name, ms in kernels.items() if name.startswith("triton"))
    print(
        f"    {sum(kernels.values()):.1f} ms of kernels, {written:.1f} of them written by the compiler, in a step of "
        f"{1000 * seconds / steps:.1f} ms with the profiler"
    )
    for name in sorted(kernels, key=kernels.__getitem__, reverse=True)[:20]:
        print(f"    {kernels[name]:8.2f} ms  {name[:100]}")


def report(task: Rows, run: Fit, config: Config, seconds: float, waited: float, start_up: float) -> None:
    model, size = config.model, parameters(config.model, config.data.vocab_size)
    place, full = attended(task.rows)
    slots = STEPS * config.train.batch_size * config.data.block_size / seconds
    rate, layers = slots * full, model.num_layers * model.hidden_size
    peak = next((PEAKS[name]["bf16"] for name in PEAKS if name in name_of(run.device)), 1.0) * 1e12
    mfu = rate * (6 * size + 12 * layers * place) / peak
    old = slots * (6 * size + 12 * layers * config.data.block_size) / peak
    memory = torch.cuda.max_memory_allocated() / 2**30 if run.device.type == "cuda" else 0.0
    print(
        f"| {size / 1e6:.0f} M | {'packed' if task.packed else 'whole rows'} | "
        f"{'compiled' if config.train.compile else 'eager'} | {rate:,.0f} | {mfu:.1%} | {old:.1%} | {waited:.1%} | "
        f"{memory:.1f} | {start_up:.0f} |",
        flush=True,
    )


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"


def mlp(compiled: Any, given: Given) -> None:
    """Prints the speed of `fit` over the loop by hand, of the MLP of bench/training.py."""
    plain = {"device": given.device, "precision": "fp32", "num_epochs": 20, "batch_size": 64, "compile": compiled}
    config = TrainConfig.model_validate(plain | {"schedule": {"name": "cosine", "warmup_ratio": 0.1}})
    torch.set_num_threads(1)
    watch = Stopwatch([by_hand(config), by_hand(config)], 20 if given.device == "cuda" else 3, 50)
    with contextlib.suppress(Enough):
        ours(config, watch)
    own, hand, again = watch.blocks().T
    print(
        f"fit / by hand, compile={compiled}: {interval(hand / own)}, by hand over itself {interval(hand / again)}, "
        f"{1e6 * np.median(hand) / 50:.0f} us a step by hand",
        flush=True,
    )


def convnet(given: Given) -> None:
    """Prints the samples per second of the convnet study's network, channels last, eager and compiled."""
    from studies.convnet.model import ResNet
    from trainer.data import TensorDataset
    from trainer.losses import cross_entropy
    from trainer.task import Loss, Task

    small, batch = given.device == "cpu", 512 if given.device == "cuda" else 8

    class Pictures(Task):
        def model(self) -> torch.nn.Module:
            return ResNet(10, width=8 if small else 64, num_blocks=2, dropout=0.0, channels_last=True)

        def train_set(self) -> TensorDataset:
            return TensorDataset(torch.rand(40 * batch, 3, 32, 32), torch.randint(10, (40 * batch,)))

        def loss(self, model: torch.nn.Module, batch: Any) -> Loss:
            return cross_entropy(model(batch[0]), batch[1])

        def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
            return {"val/loss": 0.0}

    for compiled in (False, True):
        config = TrainConfig.model_validate({"device": given.device, "batch_size": batch, "compile": compiled})
        with fresh(Pictures(None), config) as run:
            steps = Steps(run, 40)
            for _ in range(8):
                steps.take(1e-3)
            run.stepper.drain()
            wait()
            start, steps.waited = time.perf_counter(), 0.0
            for _ in range(20):
                steps.take(1e-3)
            run.stepper.drain()
            wait()
            seconds = time.perf_counter() - start
            print(
                f"convnet 64 wide, {run.config.precision}, {'compiled' if compiled else 'eager'}: "
                f"{20 * batch / seconds:,.0f} pictures/s, {steps.waited / seconds:.1%} of it waiting for data",
                flush=True,
            )


def lanes(given: Given) -> None:
    """Prints a step of 16 and of 64 lanes against as many steps of the loop by hand."""
    from bench import lanes as bench

    numbers = ["2"] if given.device == "cpu" else ["16", "64"]
    sys.argv = ["lanes", "--device", given.device, "--widths", "64", "--pairs", "4", "--lanes", *numbers]
    bench.main()


def saves(given: Given) -> None:
    """Prints how long a step stands still for a save of 124 M parameters and AdamW's state."""
    config = gpt_config("small" if given.device == "cpu" else "124M", 8, given.device)
    with fresh(Rows(config), config.train) as run:
        steps = Steps(run, 20)
        for _ in range(3):
            steps.take(1e-4)
        run.stepper.drain()
        wait()
        start = time.perf_counter()
        for _ in range(5):
            steps.take(1e-4)
        run.stepper.drain()
        wait()
        step = (time.perf_counter() - start) / 5
        run.saver.reserve(run.ranks.own(run.state.state_dict()))
        time.sleep(2)
        for background in (False, True):
            before = run.saver.seconds
            whole = run.ranks.whole(run.state.state_dict())
            run.saver.start(whole, step=run.state.step, epoch=0, metrics={}, background=background)
            while not run.saver.ready and background:
                time.sleep(0.01)
            run.saver.finish()
            print(f"a save {'in the background' if background else 'waited for'} stands still "
                  f"{run.saver.seconds - before:.3f} s; a step takes {step:.3f} s", flush=True)  # fmt: skip


class Cut(Silent):
    """Asks a fit to leave after `steps` steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    @property
    def preempted(self) -> bool:
        self.left -= 1
        return self.left < 0


def resume(given: Given) -> None:
    """Prints whether a run that was cut ends with the weights of one that was not."""
    for compiled in (False, True):
        config = gpt_config("small", 4, given.device, compile=compiled)
        ends = []
        for cuts in ((), (3, 2)):
            with tempfile.TemporaryDirectory() as directory:
                reporters = [*map(Cut, cuts), Silent()]
                stores = [CheckpointStore(Path(directory), fence=1 + attempt) for attempt in range(len(reporters))]
                for reporter, store in zip(reporters, stores, strict=True):
                    task = Rows(config)
                    task.count = 40
                    fit(task, config.train, reporter, store)
                [state, _] = stores[-1].load_latest() or ({}, None)
                ends.append(state["model"])
        equal = all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
        print(f"a run cut twice, {'compiled' if compiled else 'eager'}: {'equal' if equal else 'NOT EQUAL'} to the bit")


@dataclass(frozen=True)
class Given:
    device: str
    profile: bool


ROWS: dict[str, tuple[Callable[[Given], None], int]] = {  # what measures, and its seconds at most
    "124M-packed-compiled": (lambda given: gpt("124M", True, True, given), 150),
    "350M-whole-compiled": (lambda given: gpt("350M", False, True, given), 150),
    "mlp": (lambda given: mlp(False, given), 60),
    "124M-packed-eager": (lambda given: gpt("124M", True, False, given), 60),
    "124M-whole-compiled": (lambda given: gpt("124M", False, True, given), 100),
    "resume": (resume, 120),
    "mlp-compiled": (lambda given: mlp(True, given), 60),
    "mlp-graphs": (lambda given: mlp("graphs", given), 60),
    "convnet": (convnet, 90),
    "saves": (saves, 60),
    "lanes": (lanes, 60),
    "350M-whole-eager": (lambda given: gpt("350M", False, False, given), 60),
}
HEAD = "| parameters | rows | | tokens/s | MFU | by the old count | waiting for data | peak, GiB | start, s |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", choices=ROWS, help="a row; all where none is given")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all rows")
    parser.add_argument("--profile", action="store_true", help="also the dearest operations of a language model's step")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.row:
        return ROWS[given.row][0](Given(given.device, given.profile))
    device = torch.device(given.device)
    print(f"{machine()}; {name_of(device)}, torch {torch.__version__}\n{HEAD}\n{'|---' * 9}|", flush=True)
    until = time.monotonic() + 60 * given.minutes
    for row in given.only or ROWS:
        run_alone(row, given, until)
    return None


def run_alone(row: str, given: argparse.Namespace, until: float) -> None:
    """Runs a row in a process of its own, until its limit or that of all."""
    limit = min(ROWS[row][1], until - time.monotonic())
    if limit < 5:
        return print(f"{row}: not reached")
    command = [sys.executable, __file__, "--row", row, "--device", given.device]
    try:
        ended = subprocess.run(command + ["--profile"] * given.profile, timeout=limit)
    except subprocess.TimeoutExpired:
        return print(f"{row}: not measured within {limit:.0f} s", flush=True)
    return print(f"{row}: failed with {ended.returncode}", flush=True) if ended.returncode else None


if __name__ == "__main__":
    main()
