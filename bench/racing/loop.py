"""The training loop that a user of Optuna, Ray Tune or Syne Tune writes by hand, for the three workloads.

It has the studies' models, which need torch alone, their data, losses, optimizers, schedules and clipping, and what a
user who minds the time does: tensors in memory that are indexed batch by batch, augmentation of whole batches, fused
optimizers, a checkpoint of model and optimizer after each epoch that replaces the last one at once.
tests/bench/test_race.py holds it against the studies' own tasks.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STUDIES = Path(__file__).parent.parent.parent / "studies"
PARTS = ("train", "val", "test")
Config = Mapping[str, Any]
Batch = tuple[Tensor, Tensor]
EVALUATED_AT_ONCE = 500


def read(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "workload.json").read_text())


def module(path: str) -> Any:
    """A file of a study by itself: its package would import hpo, which a contender has no use for."""
    spec = importlib.util.spec_from_file_location("race_" + path.replace("/", "_")[:-3], STUDIES / path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


# --- Data


def prepare(workload: Config, directory: Path) -> None:
    """Write all parts once as tensors, for every process that trains."""
    torch.save(PREPARED[workload["name"]](workload["base"]), directory / "data.pt")


@lru_cache(maxsize=1)
def load(directory: Path) -> dict[str, Batch]:
    """The parts, read once by each process."""
    return torch.load(directory / "data.pt", weights_only=True)


def digits(base: Config) -> dict[str, Batch]:
    return module("mlp/data.py").digits(base["data.split_seed"])


def pictures(base: Config) -> dict[str, Batch]:
    """The convnet's generated pictures; of those to train on, some have wrong classes."""
    shapes = module("convnet/shapes.py")
    counts = {"train": base["data.pictures.num_train"], "val": base["data.num_val"], "test": 1000}
    parts: dict[str, Batch] = {}
    for place, (name, count) in enumerate(counts.items()):
        seed = 3 * base["data.seed"] + place
        x, y = map(
            torch.from_numpy, shapes.pictures(count, base["data.pictures.size"], base["data.pictures.noise"], seed)
        )
        if name == "train":
            generator = torch.Generator().manual_seed(seed)
            wrong = torch.rand(count, generator=generator) < base["data.pictures.mislabelled"]
            other = (y + torch.randint(1, shapes.CLASSES, y.shape, generator=generator)) % shapes.CLASSES
            y = torch.where(wrong, other, y)
        parts[name] = x, y
    return parts


def text(base: Config) -> dict[str, Batch]:
    """Rows of bytes, an end (256) before and behind each part's text; targets are -100 where nothing follows."""
    content = Path(base["data.path"]).read_bytes()
    cuts = [round(len(content) * (1 - k * base["data.held_out"])) for k in (2, 1)]
    parts: dict[str, Batch] = {}
    for name, begin, end in zip(PARTS, [0, *cuts], [*cuts, len(content)], strict=True):
        tokens = torch.tensor([256, *content[begin:end], 256])
        length = base["data.block_size"]
        rows = F.pad(tokens, (0, -len(tokens) % length), value=-1).view(-1, length)
        targets = F.pad(rows[:, 1:], (0, 1), value=-100)
        parts[name] = rows.clamp(min=0), torch.where(targets < 0, -100, targets)
    return parts


PREPARED: dict[str, Callable[[Config], dict[str, Batch]]] = {"mlp": digits, "convnet": pictures, "gpt": text}


# --- Models and losses


def build(name: str, config: Config) -> nn.Module:
    sizes = {path.removeprefix("model."): value for path, value in config.items() if path.startswith("model.")}
    if name == "mlp":
        return module("mlp/model.py").MLP(64, 10, **sizes)
    if name == "convnet":
        return module("convnet/model.py").ResNet(10, **sizes)
    del sizes["weights"]
    sizes["mlp_size"] = sizes["mlp_size"] or -(-sizes["hidden_size"] * 8 // 3 // 16) * 16
    return module("gpt/model.py").Llama(config["data.vocab_size"], **sizes)


def augmented(x: Tensor, config: Config) -> Tensor:
    """Each picture of a batch [n, 3, size, size] shifted, mirrored and erased by draws of its own."""
    count, _, height, width = x.shape
    margin = config["augment.crop"]
    rows, columns = (torch.randint(2 * margin + 1, (count, 1)) + torch.arange(side) for side in (height, width))
    if config["augment.flip"]:
        columns = torch.where(torch.rand(count, 1) < 0.5, columns, columns.flip(1))
    x = F.pad(x, (margin,) * 4)
    x = x[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    if not config["augment.erase"]:
        return x
    inside = [_rectangle(count, side) for side in (height, width)]
    erased = (torch.rand(count, 1, 1) < config["augment.erase"]) & inside[0][:, :, None] & inside[1][:, None, :]
    return torch.where(erased[:, None], 128, x)


def _rectangle(count: int, side: int) -> Tensor:
    """[count, side] bool: a quarter to a half of a side, anywhere."""
    length = side // 4 + torch.randint(side // 4 + 1, (count, 1))
    start = (torch.rand(count, 1) * (side - length + 1)).long()
    return (torch.arange(side) >= start) & (torch.arange(side) < start + length)


def picture_loss(model: nn.Module, x: Tensor, y: Tensor, config: Config) -> Tensor:
    """Cross-entropy or focal loss; with mixup, of two images by their shares."""

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        if config["loss.name"] == "focal":
            surprise = F.cross_entropy(logits, y, reduction="none")
            return ((1 - (-surprise).exp()) ** config["loss.gamma"] * surprise).mean()
        return F.cross_entropy(logits, y, label_smoothing=config["loss.label_smoothing"])

    if not (alpha := config["augment.mixup"]):
        return loss(model(x), y)
    share = random.betavariate(alpha, alpha)
    logits = model(share * x + (1 - share) * x.flip(0))
    return share * loss(logits, y) + (1 - share) * loss(logits, y.flip(0))


def loss_of(name: str, model: nn.Module, x: Tensor, y: Tensor, config: Config) -> Tensor:
    """The mean loss that is minimised."""
    if name == "convnet":
        return picture_loss(model, x, y, config)
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


@torch.no_grad()
def evaluate(name: str, model: nn.Module, data: Mapping[str, Batch]) -> dict[str, float]:
    """Loss, and accuracy of classes, on val and on test."""
    model.eval()
    metrics: dict[str, float] = {}
    for part in ("val", "test"):
        x, y = data[part]
        logits = torch.cat([model(some) for some in x.split(EVALUATED_AT_ONCE)]).flatten(0, -2)
        metrics[f"{part}/loss"] = F.cross_entropy(logits, y.flatten()).item()
        if name != "gpt":
            metrics[f"{part}/accuracy"] = (logits.argmax(dim=1) == y).float().mean().item()
    return metrics


# --- Training


def optimizer_of(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW or SGD with the study's defaults; vectors, such as biases and norms, do not decay."""
    kind, decay = config["train.optim.name"], config["train.optim.weight_decay"]
    decay = (0.01 if kind == "adamw" else 1e-4) if decay is None else decay
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    lr = config["train.optim.lr"] or (1e-3 if kind == "adamw" else 0.1)
    if kind == "sgd":
        momentum = config["train.optim.momentum"]
        return torch.optim.SGD(groups, lr=lr, momentum=0.9 if momentum is None else momentum, fused=True)
    betas = config["train.optim.beta1"] or 0.9, config["train.optim.beta2"] or 0.999
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


def schedule_of(optimizer: torch.optim.Optimizer, config: Config, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Constant, one cycle, or a linear warmup and half a cosine."""
    name, lr = config["train.schedule.name"], optimizer.param_groups[0]["lr"]
    if name == "one_cycle":
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, cycle_momentum=False)
    warmup = round((config["train.schedule.warmup_ratio"] or 0.0) * steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return (1 + math.cos(math.pi * min((step - warmup) / max(steps - warmup, 1), 1.0))) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor if name == "cosine" else lambda step: 1.0)


@contextmanager
def statistics_held(model: nn.Module) -> Iterator[None]:
    """SAM's second pass, at weights that are not kept, leaves batch norm's running statistics as they are."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    yield
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], config: Config) -> Tensor:
    """One step, by the gradient at the worst point nearby where SAM is on; the loss before it."""
    params: list[Tensor] = [*model.parameters()]
    optimizer.zero_grad()
    first = loss()
    first.backward()
    if config["train.optim.wrap"] == "sam":
        before = [p.detach().clone() for p in params]
        grads = [p.grad for p in params if p.grad is not None]
        scale = config["train.optim.sam.rho"] / torch.nn.utils.get_total_norm(grads).clamp(min=1e-12)
        with torch.no_grad():
            torch._foreach_add_(params, torch._foreach_mul(grads, scale))
        optimizer.zero_grad()
        with statistics_held(model):
            loss().backward()
        with torch.no_grad():
            torch._foreach_copy_(params, before)
    torch.nn.utils.clip_grad_norm_(params, config["train.clip.norm"])
    optimizer.step()
    return first.detach()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, directory / "new.pt")
    os.replace(directory / "new.pt", directory / "last.pt")


def train(
    workload: Config, data: Mapping[str, Batch], params: Config, seed: int, checkpoints: Path
) -> Iterator[dict[str, float]]:
    """The metrics after each epoch, once its checkpoint is written; it ends where a loss is not finite."""
    name, config = workload["name"], {**workload["base"], **params}
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    random.seed(seed)
    model = build(name, config)
    optimizer = optimizer_of(model, config)
    x, y = data["train"]
    batches = -(-len(x) // config["train.batch_size"])
    schedule = schedule_of(optimizer, config, batches * workload["epochs"])
    for epoch in range(1, workload["epochs"] + 1):
        model.train()
        total = 0.0
        for chosen in torch.randperm(len(x)).split(config["train.batch_size"]):
            some = augmented(x[chosen], config) if name == "convnet" else x[chosen]
            total += step(model, optimizer, partial(loss_of, name, model, some, y[chosen], config), config).item()
            schedule.step()
        metrics = {"train/loss": total / batches, "epoch": float(epoch)} | evaluate(name, model, data)
        if not math.isfinite(metrics["val/loss"]):
            return
        save(model, optimizer, epoch, checkpoints)
        yield metrics


def active(space: Mapping[str, Config], values: Config) -> dict[str, Any]:
    """Of values for all dimensions, those whose conditions hold: a tool without conditions draws the others too."""
    return {
        path: value
        for path, value in values.items()
        if all(values[parent] in allowed for parent, allowed in space[path]["when"].items())
    }


def powers(dimension: Config) -> Sequence[int]:
    """The powers of two that an Int is one of."""
    return [2**k for k in range(32) if dimension["low"] <= 2**k <= dimension["high"]]
