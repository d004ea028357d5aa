"""Estimates how much memory a training step needs, before the first one.

One window is trained on for show: the model, its optimizer and the batch are fake tensors (torch's FakeTensorMode),
which have shapes and lifetimes but no storage. Adding up what is alive at every operation gives the high-water mark
without a formula for each kind of layer. Buffers inside an operator's kernel, but for a convolution's on a CPU, and the
allocator's rounding are not seen.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from trainer.config import TrainConfig
from trainer.distributed.fake_ranks import rehearsals
from trainer.distributed.member import this
from trainer.errors import ConfigError
from trainer.gradients.accumulate import NoiseProbe, accumulate
from trainer.gradients.penalty import differentiable, penalised
from trainer.model.batch_norm import least_pass
from trainer.model.checkpointing import checkpointed
from trainer.model.offload import forgotten
from trainer.model.precision import autocast, prepare, underflow
from trainer.optim.lookahead import Lookahead
from trainer.optim.sam import Sam
from trainer.ranks import ALONE, Solo
from trainer.runtime.device import pick_device
from trainer.runtime.tensors import OF_LAZY
from trainer.task import Loss, Task, built, checked


@dataclass(frozen=True)
class Estimate:
    """Bytes of one process, of several ranks the largest. `gradients` are also those in the buckets of DDP; `copies`
    those of the weights that an average and Lookahead keep; `activations` is all that is alive at the end of the
    forward pass besides the others, with `shard=zero2` also gathered parameters; `peak` the high-water mark of a whole
    step, in which gradients grow while activations are freed, and SAM holds a copy of the weights during its second
    pass."""

    parameters: int
    gradients: int
    optimizer: int
    copies: int
    activations: int
    peak: int

    def metrics(self) -> dict[str, float]:
        return {f"memory/{name}_bytes": float(value) for name, value in asdict(self).items()}

    @property
    def parts(self) -> dict[str, int]:
        """What the peak is made of; `scratch` is what only lives within the step."""
        parts = {name: size for name, size in asdict(self).items() if name != "peak"}
        return parts | {"scratch": max(0, self.peak - sum(parts.values()))}

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_spelled(size)}" for name, size in self.parts.items())
        return f"{_spelled(self.peak)} at its peak: {parts}"


class Live(TorchDispatchMode):
    """While it is on: the bytes of the storages that tensors made or touched under it hold, now and at most.

    Of a DTensor its local part. FSDP gives memory back by resizing storages, which no mode hears of. Where `any_value`
    is set, that is what every value is that somebody looks at; fake tensors have none. `on_cpu` says that the step is
    for a CPU, whose convolutions may copy their input within an operation.
    """

    any_value: float | None = None
    on_cpu = False

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, int] = {}
        self.now = 0
        self.peak = 0

    def __enter__(self) -> Live:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = lambda storage, size: self._resized(storage, size)  # type: ignore
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore
        super().__exit__(*raised)

    def count(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                for part in _parts(tensor):
                    self._count(part.untyped_storage())

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen[key] = 0
        self._holds(key, storage.nbytes())
        weakref.finalize(storage, self._freed, key)

    def _holds(self, key: int, size: int) -> None:
        self.now += size - self._seen[key]
        self._seen[key] = size
        self.peak = max(self.peak, self.now)

    def _freed(self, key: int) -> None:
        self.now -= self._seen.pop(key)

    def _resized(self, storage: Any, size: int) -> Any:
        found = self._resize(storage, size)
        if storage._cdata in self._seen:
            self._holds(storage._cdata, size)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # until it has come down to what it does with its parts
        if self.any_value is not None and func is torch.ops.aten._local_scalar_dense.default:
            return self.any_value
        result = func(*args, **(kwargs or {}))
        self.count(tree_leaves(result))
        if self.on_cpu and func in _CONVOLUTIONS:
            self.peak = max(self.peak, self.now + _unfolded(func, args, result))
        return result


def _parts(tensor: Tensor) -> list[Tensor]:
    """Those that have the storage of a tensor, which a sparse one has not itself."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []  # oneDNN's own, which no GPU has


_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


def _unfolded(func: Any, args: Any, result: Any) -> int:
    """Returns the bytes of the copy that a convolution makes of its input within its kernel: one column of
    `channels * kernel` values for each position. oneDNN makes none, but torch's own kernels do, which compute what
    oneDNN cannot on this processor: fp16 without AVX512-FP16, bf16 without AVX-512."""
    if func is _CONVOLUTIONS[0]:
        output, (x, weight, bias, *settings) = result, args
    else:
        (output, x, weight, _, *settings), bias = args[:10], None
    backend = torch._C._select_conv_backend(x, weight, bias, *settings)
    pointwise = weight[0, 0].numel() == 1 and output.shape[2:] == x.shape[2:]  # its input is read as it is
    if pointwise or backend.name not in ("Slow2d", "Slow3d"):
        return 0
    return len(x) * weight[0].numel() * output.shape[2:].numel() * x.element_size()


def least_of(task: Task) -> int:
    """The fewest samples of a pass of the task's model: `least_pass` of one of fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return least_pass(built(task))


SHALLOW = (2, 3)  # blocks from whose needs those of a deeper model are carried on in proportion


def estimate(task: Task, config: TrainConfig, batch: Any, accumulates: bool = False) -> Estimate:
    """What training on micro-batches like `batch` (on the host, not yet moved) needs on `config`'s device, where a
    window is one of them or `accumulates` several. Of a task with a `depth`, from two shallower models. Of several
    ranks, one of which this process may be, the largest; all of them ask at once, and all hear the same.

    Raises ConfigError for ranks that cannot be estimated, and whatever the task raises where it looks at values, which
    fake tensors have not.
    """
    found = []
    with closing(rehearsals(config.parallel)) as each:
        for ranks in each:
            found += _heard(ranks, partial(_of_rank, task, config, batch, accumulates, ranks))
    return max(found, key=lambda one: one.peak)


def _heard(ranks: Solo, make: Callable[[], Estimate]) -> list[Estimate]:
    """What each of the ranks makes that this process is one of, or plays. Where one cannot, all of them raise."""
    if this() is None:
        return [make()]
    mine, failed = None, None
    try:
        mine = make()
    except Exception as error:
        failed = error
    of_all = ranks.everyone((mine, failed and f"{type(failed).__name__}: {failed}"))
    if failed is not None:
        raise failed
    if elsewhere := [why for _, why in of_all if why]:
        raise RuntimeError(f"on another rank: {elsewhere[0]}")
    return [one for one, _ in of_all]


def _of_rank(task: Task, config: TrainConfig, batch: Any, accumulates: bool, ranks: Solo) -> Estimate:
    def measured(task: Task, accumulates: bool) -> dict[str, int]:
        if ranks.sharded:  # once for nothing: of an operation that it has not met DTensor asks for whole shapes
            _measured(task, config, batch, accumulates, ranks)
        return _measured(task, config, batch, accumulates, ranks)

    # Of zero1 a rank has the state of some parameters, which is no line in the number of blocks.
    if task.depth is None or task.depth <= max(SHALLOW) or config.parallel.shard == "zero1":
        sizes = measured(task, accumulates)
    else:
        # With gradients already there each part, and the peak of each part of a step, is linear in the blocks; where a
        # rank has parts it is so in any case, and gradients that are added up are whole.
        few, more = (measured(task.of_depth(n), accumulates or not ranks.sharded) for n in SHALLOW)
        blocks = (task.depth - SHALLOW[0]) / (SHALLOW[1] - SHALLOW[0])
        sizes = {name: round(size + blocks * (more[name] - size)) for name, size in few.items()}
    peak = max(sizes.pop("passes"), sizes.pop("update"))
    return Estimate(**sizes, peak=peak)


def _measured(task: Task, config: TrainConfig, batch: Any, accumulates: bool, ranks: Solo) -> dict[str, int]:
    """The parts, and the peaks of the passes and of the optimizer's update. Two steps are taken, since an optimizer
    makes its state in the first; only the second has a window of several micro-batches, which then needs most."""
    fake, device = FakeTensorMode(allow_non_fake_inputs=True), pick_device(config.device)
    parts = ranks if ranks.sharded else ALONE  # replicas hold, and pass through, what a process does that is alone
    with fake, Live() as live:
        live.on_cpu = device.type == "cpu"
        model = prepare(built(task), "bf16" if config.precision == "fp8" else config.precision)
        model = parts.prepare(checkpointed(model, config.activations, draws=False), task)
        parameters = live.peak = live.now  # it is made on the host: what that took beside is gone
        optimizer, sent = ranks.optimizer(config.optim, model), ranks.rehearse(model)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        begun = live.now
        moving = [*params, *model.buffers()] if config.average.name != "none" else []
        average = [t.detach().clone() for t in moving]
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        lookahead = Lookahead(named, k, alpha=1.0) if (k := config.optim.lookahead_k) else None
        sam = Sam(params, config.optim.sam, ALONE.norm) if config.optim.wrap == "sam" else None
        probe = NoiseProbe(params) if config.gradients.noise_scale else None
        copies = live.now - begun
        inputs = tree_map(lambda x: fake.from_tensor(x) if isinstance(x, Tensor) else x, batch)
        live.count(tree_leaves(inputs))
        several = 2 if accumulates or config.largest_pass < config.largest_share else 1
        forward: list[int] = []

        def loss_of(micro_step: int, batch: Any) -> Loss:
            before = live.now
            with autocast(config.precision, torch.device("cpu")), forgotten(config.activations, device):
                loss = penalised(config.gradients, model, lambda: checked(task, task.loss(model, batch)))
            forward.append(live.now - before)
            return loss

        def passes(count: int, probe: NoiseProbe | None = None) -> None:
            optimizer.zero_grad()
            with differentiable(config.gradients):
                accumulate([inputs] * count, loss_of, probe, parts)
            with torch.no_grad():
                ranks.reduce(params, 1.0)

        peaks = {"passes": 0, "update": 0}
        for count in (1, several):
            passes(count, probe)
            if sam is not None:
                with sam.perturbed():
                    passes(count)
            if config.precision == "fp16":
                underflow([p.grad for p in params if p.grad is not None])
            peaks["passes"], live.peak = max(peaks["passes"], live.peak), live.now
            live.any_value = 1.0  # of a norm, or the number of the step
            optimizer.step()
            live.any_value = None
            if lookahead is not None:
                lookahead.step()
            peaks["update"], live.peak = max(peaks["update"], live.peak), live.now
        gradients = _bytes(p.grad for p in model.parameters()) + _bytes(sent)
        del average  # it is kept through all steps
        state = _bytes(tree_leaves([dict(state) for state in ranks.keeper(optimizer).state.values()]))
        sizes = {"parameters": parameters, "gradients": gradients, "optimizer": state, "copies": copies}
        return sizes | peaks | {"activations": forward[-1]}


@dataclass(frozen=True)
class Plan:
    """What the micro-batch that is asked for needs, and the largest of its halves that `limit` bytes hold; None where
    not even one sample fits."""

    asked: Estimate
    size: int
    limit: int
    fits: int | None
    may_shrink: bool
    ranks: int = 1
    least: int = 1  # the smallest that was asked about

    @property
    def refused(self) -> bool:
        """Whether nothing fits, or only what nobody has asked for."""
        return self.fits is None or (self.fits < self.size and not self.may_shrink)

    def refusal(self) -> str:
        """Why the micro-batch cannot be trained on, and what would fit."""
        if self.fits is None:
            fix = f"not even {self.least} fits: make the model smaller, or take an optimizer that keeps less."
        else:
            fix = f"train.micro_batch_size={self.fits} would fit; with auto it is chosen."
        of = f" on the largest of {self.ranks} ranks" if self.ranks > 1 else ""
        return (
            f"out of memory, by the estimate: a micro-batch of {self.size} needs{of} {self.asked}; it may "
            f"have {_spelled(self.limit)} (train.memory_limit, else what the device has); {fix}"
        )


def plan(
    task: Task,
    config: TrainConfig,
    limit: int,
    size: int,
    batch_of: Callable[[int], Any],
    *,
    may_shrink: bool = True,
    halved: Callable[[int], int] = lambda size: -(-size // 2),
) -> Plan:
    """Make the micro-batch smaller, from `size` on, until the estimate fits; `batch_of(size)` gives one of the task's
    own, where its `largest_batch` gives none, and `halved(size)` the next smaller size, itself where there is none.

    Raises ConfigError where the loss looks at values, or computes what only values give a shape, and for ranks that
    cannot be estimated; what the task raises, as it is.
    """
    task = copy.copy(task)  # whatever its model() keeps of the model made for show

    def largest(size: int) -> Any:
        return batch_of(size) if (batch := task.largest_batch(size)) is None else batch

    size = min(size, config.largest_share)
    try:
        asked = needed = estimate(task, config, largest(size))
        fits = size
        while needed.peak > limit and (smaller := halved(fits)) < fits:
            fits = smaller
            needed = estimate(task, config, largest(fits), accumulates=True)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        raise ConfigError(
            "the loss looks at values, so what a step needs cannot be estimated: leave train.memory_limit out and set "
            f"train.micro_batch_size to a number ({error})."
        ) from error
    except RuntimeError as error:
        if "Couldn't swap" in str(error):  # torch's, of fake parameters
            raise ConfigError(
                "Task.model() converts its model, by .to() or .double() say, which no estimate of memory can follow: "
                "make the layers so, or leave train.memory_limit out and set train.micro_batch_size to a number."
            ) from error
        if OF_LAZY in str(error):
            raise ConfigError(
                f"{type(task).__name__} has lazy layers, whose sizes no estimate of memory knows: give them their "
                "sizes, or leave train.memory_limit out and set train.micro_batch_size to a number."
            ) from error
        if config.parallel.ranks == 1:
            raise
        raise ConfigError(
            "what a step of these ranks needs cannot be estimated: leave train.memory_limit out and set "
            f"train.micro_batch_size to a number ({next(iter(str(error).splitlines()), type(error).__name__)})."
        ) from error
    return Plan(asked, size, limit, fits if needed.peak <= limit else None, may_shrink, config.parallel.ranks, fits)


def _spelled(size: float) -> str:
    power, unit = (30, "GiB") if size >= 2**30 else (20, "MiB") if size >= 2**20 else (10, "KiB")
    return f"{size / 2**power:.{2 if power == 30 else 1}f} {unit}"


def _bytes(tensors: Iterable[Any]) -> int:
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    storages = [t.untyped_storage() for t in local if isinstance(t, Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())  # FSDP's gradients share some
