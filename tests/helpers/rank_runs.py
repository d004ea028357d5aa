"""What the ranks of a test do: runs of `fit` whose losses and weights are handed back, in as few launches as may be."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from trainer_runs import Killed, Toy, Trial

from trainer.checkpoint import files
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.store import load
from trainer.checkpoint.stored_tensors import Part
from trainer.distributed.follow import follow
from trainer.distributed.group import Several
from trainer.distributed.member import this
from trainer.distributed.nodes import Nodes
from trainer.errors import ConfigError
from trainer.metrics.meter import Meter
from trainer.optim.optimizer_state import Kept
from trainer.report import Verdict
from trainer.runtime.window import Window
from trainer.task import Loss

# 5 epochs of 37 samples are 20 windows, every fourth of them of one sample; each other one is two or more micro-batches
# of every rank; the norm is clipped in most of them.
PARITY: dict[str, Any] = {"num_epochs": 5, "batch_size": 12, "micro_batch_size": 2, "clip": {"norm": 0.5}}
PARITY["checkpoint"] = {"every_epochs": 1}
# 2 epochs, 8 windows, are enough where nothing has to happen in the middle of a run.
SHORT: dict[str, Any] = {"num_epochs": 2, "checkpoint": {"every_epochs": 2}}


class Smooth(Toy):
    """Neither dropout nor batch norm, so that any number of ranks computes the same. The last window of an epoch holds
    one sample, so that all replicas but the first have none of it."""

    samples = 37
    windows = 20

    @property
    def window(self) -> int:
        """The number of the window that is being trained on, from 0."""
        return round(self.progress * self.windows)

    def model(self) -> nn.Module:
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3))
        return self.net

    def parallel_plan(self, model: nn.Module) -> dict[str, str]:
        return {"0": "colwise", "2": "rowwise"}


class Normed(Smooth):
    """With a norm, which computes in fp32."""

    def model(self) -> nn.Module:
        self.net = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))
        return self.net


class Gathered(Normed):
    """Which looks at what its layers' weights come in."""

    def model(self) -> nn.Module:
        self.dtypes: dict[str, torch.dtype] = {}
        for layer in (net := super().model())[:2]:
            layer.register_forward_pre_hook(self.look)
        return net

    def look(self, module: nn.Linear, args: Any) -> None:
        self.dtypes["norm" if isinstance(module, nn.LayerNorm) else "linear"] = module.weight.dtype

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        assert self.dtypes == {"linear": torch.bfloat16, "norm": torch.float32}
        return loss


class Double(Smooth):
    """All of it in float64. Of its weights' sides none longer than 6 exceeds the rank of a gradient."""

    def model(self) -> nn.Module:
        widths = (6, 6, 6, 16)
        parts = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.Tanh())]
        self.net = nn.Sequential(*parts, nn.Linear(16, 3)).double()
        return self.net

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return super().loss(model, (x.double(), y))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


class Deep(Smooth):
    """Of so many parts that a rank can have two stages."""

    def model(self) -> nn.Module:
        widths = (6, 16, 12, 10, 8)
        parts = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.Tanh())]
        self.net = nn.Sequential(*parts, nn.Linear(8, 3))
        return self.net


class Large(Smooth):
    """Of several buckets of a MB."""

    def model(self) -> nn.Module:
        widths = (6, 512, 512, 512)
        parts = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.Tanh())]
        self.net = nn.Sequential(*parts, nn.Linear(512, 3))
        return self.net


class Block(Smooth):
    """A layer of a transformer over the six features, of which ranks hold parts between the divided layers."""

    dropout = 0.0

    def model(self) -> nn.Module:
        self.net = Layer(self.dropout)
        return self.net

    def parallel_plan(self, model: nn.Module) -> dict[str, str]:
        plan = {"embed": "scatter", "norm*": "sequence", "drop": "sequence", "attend": "gather", "head": "gather"}
        plan |= {"attend.[qkv]": "colwise", "attend.out": "rowwise_scatter"}
        return plan | {"up": "colwise", "down": "rowwise_scatter"}

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        assert self.net.tokens == (6 if this() is None else 3), "as many tokens pass a norm"
        return loss


class Dropping(Block):
    """The same with dropout."""

    dropout = 0.3


class Mixed(Block):
    """Its sums are of parts of the sequence and of the whole."""

    def parallel_plan(self, model: nn.Module) -> dict[str, str]:
        return {"attend.[qkv]": "colwise", "attend.out": "rowwise", "up": "colwise", "down": "rowwise_scatter"}


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.head = Embed(), nn.Linear(8, 3)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(8), nn.RMSNorm(8), nn.LayerNorm(8)
        self.norm3.weight.requires_grad_(False)
        self.attend, self.drop = Attention(), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm1.register_forward_pre_hook(self.look)
        self.tokens = 0

    def look(self, module: nn.Module, args: tuple[torch.Tensor]) -> None:
        self.tokens = getattr(args[0], "_local_tensor", args[0]).shape[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = x + self.drop(self.attend(self.norm1(x)))
        x = x + self.drop(self.down(gelu(self.up(self.norm2(x)))))
        return self.head(self.norm3(x)).mean(1)


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.place = nn.Linear(1, 8), nn.Parameter(torch.randn(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x.unsqueeze(-1)) + self.place


class Attention(nn.Module):
    """Of as many heads of width 4 as there are columns for."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.out = (nn.Linear(8, 8) for _ in range(3))
        self.k = nn.Linear(8, 8, bias=False)  # whose gradient would be nothing but rounding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Wide(Toy):
    """With enough parameters for several of DDP's buckets, whose layout then matters, and batch norm, which takes no
    batch of one sample."""

    samples = 48

    def model(self) -> nn.Module:
        self.net = nn.Sequential(
            nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.Tanh(),
            nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3),
        )  # fmt: skip
        return self.net

    def parallel_plan(self, model: nn.Module) -> dict[str, str]:
        return {"4": "colwise", "6": "rowwise"}


class Adapted(Smooth):
    """The second layer is frozen; however small that is, checkpoints keep it in a file of its own."""

    def model(self) -> nn.Module:
        files.SMALL = 0
        net = super().model()
        net[2].requires_grad_(False)
        return net


class Bad(Smooth):
    """Whatever rank 1 trains on after the fourth window is not finite."""

    first = 3

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        bad = rank() == 1 and self.window >= self.first
        return Loss(loss.sum * float("nan") if bad else loss.sum, loss.count)


class BadFromTheStart(Bad):
    first = 0


class Spoils(nn.Module):
    """What rank 1 has, if `on`, it spoils."""

    on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float("nan") if self.on and rank() == 1 else x


class SpoiltWithin(Smooth):
    """From the fourth window on, before what a rank has goes to the other one, by tensor or as the next stage."""

    windows = 8

    def model(self) -> nn.Module:
        hidden = [part for _ in range(3) for part in (nn.Linear(8, 8), nn.Sequential(nn.Tanh(), Spoils()))]
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *hidden, nn.Linear(8, 3))
        return self.net

    def parallel_plan(self, model: nn.Module) -> dict[str, str]:
        return {"2": "colwise", "4": "rowwise"}

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        Spoils.on = self.window >= 3
        return super().loss(model, batch)


class Jumping(Smooth):
    """The loss of window 10 is far above the others."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.sum * (1e4 if self.window == 10 else 1.0), loss.count)


def rank() -> int:
    member = this()
    return 0 if member is None else member.rank


class OneJumps(Smooth):
    """The same of rank 1's share alone."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        return Loss(loss.sum * 1e4, loss.count, loss.terms) if hits(1) and self.window == 10 else loss


class Tight(Smooth):
    """From window `start` on, rank 1's memory holds one sample at a time."""

    windows = 8
    start = 5

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        if hits(1) and self.window >= self.start and len(batch[1]) > 1:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory")
        return super().loss(model, batch)


class TightFromTheStart(Tight):
    start = 0


class TightOnTheWayBack(Smooth):
    """The same, and it is the backward pass that runs out."""

    windows = 8

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss = super().loss(model, batch)
        if hits(1) and self.window >= Tight.start and len(batch[1]) > 1:
            loss.sum.register_hook(self.run_out)
        return loss

    def run_out(self, grad: torch.Tensor) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory")


def hits(number: int) -> bool:
    """Whether this process is rank `number`, or alone."""
    return this() is None or rank() == number


@contextmanager
def at_each_window(look: Any) -> Iterator[None]:
    """Call `look(window, norm)` on every rank as each window's numbers enter its meter."""
    add = Meter.add

    def noted(self: Meter, step: int, window: Window, norm: Any) -> None:
        look(window, norm)
        add(self, step, window, norm)

    Meter.add = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Meter.add = add  # type: ignore[method-assign]


@contextmanager
def reads() -> Iterator[list[int]]:
    """The bytes of every piece of a checkpoint's tensors that this rank reads."""
    sizes: list[int] = []
    read = Part.read

    def noted(self: Part, box: Any) -> torch.Tensor:
        piece = read(self, box)
        sizes.append(piece.nbytes)
        return piece

    Part.read = noted  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        Part.read = read  # type: ignore[method-assign]


@contextmanager
def reservations() -> Iterator[dict[str, int]]:
    """By the name of each file of this rank, the bytes of memory that it makes beforehand for copies of its tensors."""
    sizes: dict[str, int] = {}
    reserve = Saver.reserve

    def noted(self: Saver, state: dict[str, Any]) -> None:
        for name, tensors in files.pack(state, self.ranks.mine).tensors.items():
            sizes[f"{name}{self.ranks.suffix}.safetensors"] = sum(tensor.nbytes for tensor in tensors.values())
        reserve(self, state)

    Saver.reserve = noted  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        Saver.reserve = reserve  # type: ignore[method-assign]


def run(
    directory: str, task: str = "Smooth", cut: int = 0, stop: int = 0, fate: str = "", **config: Any
) -> dict[str, Any]:
    """One run in `directory`, where it goes on from what lies there: every window's loss, how it ended, the weights at
    its end, and the bytes of checkpoints that were read, and of memory that was made for copies. After `cut` windows
    all ranks drop everything and start again; at epoch `stop` comes a verdict; in the sixth window rank 1 suffers
    `fate`, once."""
    losses: list[float] = []
    verdict = (lambda step, metrics, epoch: Verdict("stop" if epoch == stop else "continue")) if stop else None
    trial = Trial(Path(directory), task=globals()[task], verdict=verdict, **PARITY | config)
    if rank() == 0:
        trial.reporter.committed = sorted(_found(trial.directory), key=lambda ref: -ref.step)

    def look(window: Window, norm: Any) -> None:
        losses.append(float(window.loss) / float(window.count))
        if len(losses) == cut:
            raise Killed
        if fate and rank() == 1 and len(losses) == 6:
            suffer(fate)

    with at_each_window(look), reads() as sizes, reservations() as reserved:
        outcome = trial.attempt() or trial.attempt()
    assert outcome is not None
    committed = trial.reporter.committed  # rank 0's alone
    files.SMALL = 1 << 20
    if fate:
        leave_no_wish()
    state = load(committed[0].path) if committed else {"model": {}}
    weights = {name: value.flatten().tolist() for name, value in state["model"].items()}
    return {"losses": losses, "outcome": asdict(outcome), "weights": weights, "read": sum(sizes)} | {
        "events": trial.reporter.events,
        "artifacts": trial.reporter.artifacts,
        "reserved": reserved,
        "communication": [v for (_, key), v in trial.reporter.values.items() if key == "time/communication_share"],
    }


def _found(directory: Path) -> list[Any]:
    from hashlib import sha256

    from trainer.report import CheckpointRef

    refs = []
    for manifest in directory.glob("step-*/manifest.json"):
        step = int(manifest.parent.name[5:13])
        refs.append(CheckpointRef(manifest.parent, step, 0, sha256(manifest.read_bytes()).hexdigest(), 0))
    return refs


def runs(job: dict[str, Any]) -> dict[str, Any]:
    """Several of them, by name; and what `sharded` gives."""
    found = {"sharded": sharded(job["sharded"], Path(job["directory"], "sharded"))} if "sharded" in job else {}
    if "reductions" in job:
        found["reductions"] = reductions(**job["reductions"])
    if "low_rank" in job:
        found["low_rank"] = low_rank()
    for name, config in job["runs"].items():
        try:
            found[name] = run(**config | {"directory": f"{job['directory']}/{config.get('directory', name)}"})
        except ConfigError as error:
            found[name] = str(error)
    return found


def sharded(names: list[str], directory: Path) -> dict[str, Any]:
    """By optimizer, how far six steps of a model under zero3, saved and loaded after the third, end from those of the
    whole model, and how far these have gone: the largest difference of any weight."""
    from trainer.config import OptimConfig, ParallelConfig
    from trainer.distributed.fsdp import Sharded
    from trainer.optim import build as optim

    x, y = torch.randn(16, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(16, 1)
    member = this()
    assert member is not None
    ranks = Sharded(ParallelConfig(data=2, shard="zero3"), member, torch.device("cpu"))

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 15), nn.LayerNorm(15), nn.Tanh(), nn.Linear(15, 3), nn.Linear(3, 1))

    def trained(net: nn.Module, name: str, *, sharded: bool) -> list[torch.Tensor]:
        def fresh() -> torch.optim.Optimizer:
            return optim.build(OptimConfig(name=name, lr=0.01), net, sharded=sharded)

        optimizer = fresh()
        for i in range(6):
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()
            optimizer.step()
            if sharded and i == 2:
                optimizer = reloaded(net, optimizer, fresh(), ranks, directory / name)
        return [p.full_tensor() if sharded else p for p in net.parameters()]

    results = {}
    for name in names:
        parts = ranks.prepare(model(), Toy(None))
        whole, of_parts = trained(model(), name, sharded=False), trained(parts, name, sharded=True)
        pairs = {"error": (whole, of_parts), "moved": (whole, list(model().parameters()))}
        results[name] = {
            key: max((p - q).abs().max().item() for p, q in zip(*pair, strict=True)) for key, pair in pairs.items()
        }
        with pytest.raises(ConfigError, match=r"shape \[6\] that is not reduced yet .*keep its full_tensor"):
            ranks.mine(parts[0].weight.detach().sum(0))
    return results


def reloaded(
    net: nn.Module, optimizer: torch.optim.Optimizer, fresh: torch.optim.Optimizer, ranks: Several, directory: Path
) -> torch.optim.Optimizer:
    """`fresh` with what `optimizer` has kept, by way of a checkpoint."""
    names = {p: name for name, p in net.named_parameters()}
    saver = Saver(directory, 1, "")
    saver.ranks = ranks
    kept = {"optimizer": Kept(optimizer, optimizer, names).state()}
    saver.start(kept, step=1, epoch=0, metrics={}, background=False)
    ref = saver.finish()
    assert ref is not None
    state, _ = files.read(ref.path, ref.sha256, ranks.take)
    Kept(fresh, fresh, names).load(state["optimizer"])
    return fresh


def reductions(directory: str, ways: dict[str, Any]) -> dict[str, list[int]]:
    """By way, the collectives that reduce in a run whose windows are one micro-batch of each rank, or six."""
    found: dict[str, list[int]] = {name: [] for name in ways}
    for name, kind in ways.items():
        for size in (6, 1):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                run(f"{directory}/{name}-{size}", parallel=kind, micro_batch_size=size, num_epochs=1)
            assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
            names = [event.name() for event in profiler.profiler.kineto_results.events()]  # without their statistics
            found[name].append(sum(names.count(f"c10d::{op}") for op in ("allreduce_", "_reduce_scatter_base_")))
    return found


def low_rank() -> dict[str, Any]:
    """What PowerSGD of rank 2 makes of gradients [32, 24] of unlike windows, on two ranks: how far it is from the mean
    gradient where that is of rank 2; how far all that was sent, and left out, is from all that was to be sent; the rank
    of what is sent; and whether a NaN on rank 1 reaches both and nothing that is kept."""
    from trainer.distributed.powersgd import PowerSGD

    def add_up(tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    def of_all(tensor: torch.Tensor) -> torch.Tensor:
        stacked = [torch.empty_like(tensor) for _ in range(2)]
        dist.all_gather(stacked, tensor)
        return torch.stack(stacked)

    def window(gradient: torch.Tensor, count: float) -> tuple[torch.Tensor, torch.Tensor]:
        layer.weight.grad, layer.bias.grad = gradient.clone(), gradient[:, 0].clone()
        powersgd.reduce(count)
        assert layer.bias.grad.allclose(of_all(gradient[:, 0]).sum(0), equal_nan=True)
        return layer.weight.grad / count, of_all(gradient).sum(0) / count

    layer = nn.Linear(24, 32)
    powersgd = PowerSGD(layer, 2, 2, add_up)
    common, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2 + rank())
    columns = torch.randn(32, 2, generator=common)
    sent, meant = window(columns @ torch.randn(2, 24, generator=own), 5.0)
    found: dict[str, Any] = {"exact": (sent - meant).norm().item() / meant.norm().item()}
    for count in (12.0, 7.0, 1.0, 12.0):
        one, mean = window(torch.randn(32, 24, generator=own), count)
        sent, meant = sent + one, meant + mean
    found["rank"] = int(torch.linalg.matrix_rank(one))
    state = powersgd.state(of_all)
    left_out = state["left_out"]["weight"].mean(0)
    found["lost"] = (sent + left_out - meant).norm().item() / meant.norm().item()
    found["left_out"] = left_out.norm().item() / meant.norm().item()
    bad, _ = window(torch.full((32, 24), float("nan") if rank() == 1 else 1.0), 12.0)
    after = powersgd.state(of_all)
    found["bad"] = bool(bad.isnan().all()) and all(
        values["weight"].equal(after[name]["weight"]) for name, values in state.items()
    )
    return found


def suffer(fate: str) -> None:
    if fate == "error":
        raise ValueError("a bug of the user's")
    if fate == "hang":
        threading.Event().wait()
    os.kill(os.getpid(), getattr(signal, fate))


def leave_no_wish() -> None:
    """The wish to leave, which SIGTERM has left with all ranks, is over for the runs that follow."""
    member = this()
    if member is not None:
        dist.barrier()
        member.page._words[0] = 0


def losses_of(result: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(result["losses"], dtype=torch.float64)


class Stack(Block):
    """Two such layers, the sequence divided between them as well; each is a stage, or more."""

    def model(self) -> nn.Module:
        self.net = nn.Sequential(Embed(), Residual(), Residual(), Head())
        return self.net

    def parallel_plan(self, model: nn.Module) -> dict[str, str]:
        plan = {"0": "scatter", "*.norm?": "sequence", "3.norm": "sequence", "3.out": "gather"}
        plan |= {"*.attend": "gather", "*.attend.[qkv]": "colwise", "*.attend.out": "rowwise_scatter"}
        return plan | {"[12].up": "colwise", "[12].down": "rowwise_scatter"}

    loss = Smooth.loss


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attend = nn.LayerNorm(8), nn.RMSNorm(8), Attention()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x)).mean(1)


if __name__ == "__main__":  # a node but the first, of test_nodes.py
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    follow(Nodes.of_torchrun(), "rank_runs:runs", {}, lambda: bool(asked))
