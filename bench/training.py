"""What the trainer costs: `fit` against a loop written by hand, in one process, in alternating blocks of steps.

    python bench/training.py [--pairs 200] [--steps 100] [--device cpu]

All train the same MLP, 64 wide, on the same loader with AdamW, clipping and a cosine schedule. `fit` also keeps its
metrics, its guard against NaN, its seeds, its deterministic mode and its checkpoints (one per epoch of 1000 steps);
the loop by hand has none of these. Every block of `fit` is followed by two blocks of the loop by hand: the first is
its pair, the second shows what the machine's noise alone does to such a ratio. The same again with the model compiled
in both. Where they are installed, as by `make bench`, Accelerate's loop takes turns too, and Lightning is held against
the loop by hand in the same way as `fit` is.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

# Run as a script, this file's own directory comes first, and this file would be the `trainer` that is imported.
sys.path[0] = str(Path(__file__).parents[1])

from bench.machine import machine  # noqa: E402
from trainer.checkpoint.store import CheckpointStore  # noqa: E402
from trainer.config import TrainConfig  # noqa: E402
from trainer.data import Loader, TensorDataset  # noqa: E402
from trainer.data.loader import to_device  # noqa: E402
from trainer.loop import fit  # noqa: E402
from trainer.optim import build as optim  # noqa: E402
from trainer.optim.schedule import schedule  # noqa: E402
from trainer.report import Silent  # noqa: E402
from trainer.runtime.device import pick_device  # noqa: E402
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


class Setting:
    """What every loop trains with: the model, the loader, the optimizer, the rate of each step, and for how long."""

    def __init__(self, config: TrainConfig) -> None:
        self.device = pick_device(config.device)
        self.model = Mlp(None).model().to(self.device)
        self.loader = Loader(Mlp(None), config, self.device)
        self.optimizer = optim.build(config.optim, self.model)
        epochs = self.loader.sampler.epochs
        total = int(epochs.step(config.num_epochs))
        self.lr_at = schedule(config.schedule, optim.learning_rate(config.optim), total, epochs)
        self.num_epochs = config.num_epochs

    def batches(self) -> Iterator[tuple[int, Any, Any]]:
        """(step, x, y)"""
        epochs = (self.loader.epoch(epoch, 0) for epoch in range(self.num_epochs))
        for step, [batch] in enumerate(window for epoch in epochs for window in epoch):
            yield step, *to_device(batch, self.device)

    def set_lr(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr_at(step)


def by_hand(config: TrainConfig) -> Iterator[None]:
    """The loop as one writes it; yields after every step."""
    setting = Setting(config)
    model = torch.compile(setting.model, dynamic=False) if config.compile else setting.model
    for step, x, y in setting.batches():
        setting.set_lr(step)
        setting.optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(setting.model.parameters(), 1.0)
        setting.optimizer.step()
        yield


def by_accelerate(config: TrainConfig) -> Iterator[None]:
    """The loop as Accelerate's guide has it."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    setting, accelerator = Setting(config), Accelerator(cpu=pick_device(config.device).type == "cpu")
    model, optimizer = accelerator.prepare(setting.model, setting.optimizer)
    for step, x, y in setting.batches():
        with accelerator.accumulate(model):
            setting.set_lr(step)
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        yield


class Enough(Exception):
    """All blocks are measured."""


class Stopwatch:
    """Every `steps` steps of the loop it watches, which calls `step`, it times each of the `others` for as many."""

    def __init__(self, others: list[Iterator[None]], pairs: int, steps: int) -> None:
        self.others, self.pairs, self.steps, self.count = others, pairs, steps, 0
        self.seconds: list[list[float]] = []  # of each block: the watched loop, then the others
        self.started = time.perf_counter()

    def step(self) -> None:
        if self.count % self.steps == 0:
            wait()
            self.seconds.append([time.perf_counter() - self.started, *map(self._block, self.others)])
            if len(self.seconds) > self.pairs:
                raise Enough
            self.started = time.perf_counter()
        self.count += 1

    def _block(self, loop: Iterator[None]) -> float:
        exact = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(False)
        start = time.perf_counter()
        for _ in range(self.steps):
            next(loop)
        wait()
        seconds = time.perf_counter() - start
        torch.use_deterministic_algorithms(exact)
        return seconds

    def blocks(self) -> np.ndarray:
        """[blocks, loops], without the first, which is the set-up."""
        return np.array(self.seconds[1:])


def wait() -> None:
    """Until a GPU has done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Watched(Silent):
    """Lets the stopwatch see every step."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    @property
    def preempted(self) -> bool:
        self.watch.step()
        return False


def ours(config: TrainConfig, watch: Stopwatch) -> None:
    with tempfile.TemporaryDirectory() as directory:
        fit(Mlp(None), config, Watched(watch), CheckpointStore(Path(directory) / "checkpoints", fence=1))


def lightning(config: TrainConfig, watch: Stopwatch) -> None:
    """Lightning's Trainer with what only costs it time switched off: logger, progress bar, checkpoints."""
    import lightning as L  # pyright: ignore[reportMissingImports]

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    setting = Setting(config)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = setting.model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return setting.optimizer

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            setting.set_lr(self.global_step)
            watch.step()

    class Batches:
        def __iter__(self) -> Iterator[Any]:
            return ((x, y) for _, x, y in setting.batches())

    off: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(accelerator=setting.device.type, max_epochs=1, gradient_clip_val=1.0, barebones=False, **off)
    trainer.fit(Module(), Batches())


def interval(ratios: np.ndarray, resamples: int = 10_000) -> str:
    """The median and its 95 % bootstrap interval."""
    draws = np.random.default_rng(0).choice(ratios, (resamples, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return f"{np.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


def measure(loop: Callable[[TrainConfig, Stopwatch], None], config: TrainConfig, others: list[Any], given: Any) -> Any:
    """The seconds of each block: of `loop`, then of the `others`."""
    watch = Stopwatch([other(config) for other in others], given.pairs, given.steps)
    torch.set_num_threads(1)
    with contextlib.suppress(Enough):
        loop(config, watch)
    return watch.blocks()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    epochs = given.pairs * given.steps * 2 * BATCH // SAMPLES + 2
    plain = {"device": given.device, "precision": "fp32", "num_epochs": epochs, "batch_size": BATCH}
    plain |= {"schedule": {"name": "cosine", "warmup_ratio": 0.1}}
    config = TrainConfig.model_validate(plain)
    print(f"{machine()}, torch {torch.__version__}; {given.pairs} pairs of {given.steps} steps of {BATCH} samples")
    installed = {name: importlib.util.find_spec(name) is not None for name in ("accelerate", "lightning")}
    others = [by_hand, by_hand, *([by_accelerate] if installed["accelerate"] else [])]
    own, hand, again, *accelerate = measure(ours, config, others, given).T
    print(f"by hand {1e6 * np.median(hand) / given.steps:.0f} us a step; speeds over it, median [95 %]:")
    print(f"fit                  {interval(hand / own)}   {hand.sum() / own.sum():.3f} of all time")
    print(f"by hand              {interval(hand / again)}")
    for seconds in accelerate:
        print(f"accelerate           {interval(hand / seconds)}")
    if installed["lightning"]:
        own, hand = measure(lightning, config, [by_hand], given).T
        print(f"lightning            {interval(hand / own)}")
    compiled = TrainConfig.model_validate({**plain, "compile": True})
    own, hand, again = measure(ours, compiled, [by_hand, by_hand], given).T
    print(f"fit, both compiled   {interval(hand / own)}   by hand {1e6 * np.median(hand) / given.steps:.0f} us a step")
    print(f"by hand, compiled    {interval(hand / again)}")


if __name__ == "__main__":
    main()
