"""Estimates how much memory a training step needs, before the first one.

One window is trained on in simulation: the model, its optimizer and the batch are fake tensors (torch's
FakeTensorMode), which have shapes and lifetimes but no storage. Adding up the live storages at every operation gives
the high-water mark without a formula for each kind of layer. Buffers inside an operator's kernel, other than a
convolution's on a CPU, and the allocator's rounding are not seen.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.compat.fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from trainer.compat.pytree import tree_leaves, tree_map
from trainer.compat.tensors import identity
from trainer.config import TrainConfig
from trainer.distributed.fake_ranks import rehearsals
from trainer.distributed.member import this
from trainer.errors import ConfigError
from trainer.gradients.accumulate import NoiseProbe, accumulate
from trainer.gradients.penalty import differentiable, penalised
from trainer.memory.live import Live
from trainer.model.attention import as_on
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
    """Bytes of one process; with several ranks, of the largest.

    `gradients` includes those in the buckets of DDP; `copies` are those of the weights that an average and Lookahead
    keep; `activations` is all else that is alive at the end of the forward pass, with `shard=zero2` also gathered
    parameters; `peak` is the high-water mark of a whole step, in which gradients grow while activations are freed, and
    SAM holds a copy of the weights during its second pass.
    """

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
        """Returns the parts of the peak; `scratch` is the memory that lives only within the step."""
        parts = {name: size for name, size in asdict(self).items() if name != "peak"}
        return parts | {"scratch": max(0, self.peak - sum(parts.values()))}

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_spelled(size)}" for name, size in self.parts.items())
        return f"{_spelled(self.peak)} at its peak: {parts}"


def least_of(task: Task) -> int:
    """Returns the fewest samples of a pass of the task's model: `least_pass` of a model of fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return least_pass(built(task))


SHALLOW = (2, 3)  # numbers of blocks from which a deeper model's needs are extrapolated


def estimate(task: Task, config: TrainConfig, batch: Any, accumulates: bool = False) -> Estimate:
    """Returns the memory for training on micro-batches like `batch` (on the host, not yet moved) on `config`'s device.

    A window has one of them, or several if `accumulates`. A task with a `depth` is estimated from two shallower models.
    With several ranks, of which this process may be one, it is the largest estimate; all of them call this at once, and
    get the same answer. Raises ConfigError for ranks that cannot be estimated, and any error of a task that reads
    values, which fake tensors do not have.
    """
    estimates = []
    with closing(rehearsals(config.parallel)) as rehearsals_of_ranks:
        for ranks in rehearsals_of_ranks:
            estimates += _heard(ranks, partial(_of_rank, task, config, batch, accumulates, ranks))
    return max(estimates, key=lambda made: made.peak)


def _heard(ranks: Solo, make: Callable[[], Estimate]) -> list[Estimate]:
    """Returns the estimates of all ranks, real or simulated by this process. If one fails, all of them raise."""
    if this() is None:
        return [make()]
    made, failed = None, None
    try:
        made = make()
    except Exception as error:
        failed = error
    answers = ranks.everyone((made, failed and f"{type(failed).__name__}: {failed}"))
    if failed is not None:
        raise failed
    if reasons := [why for _, why in answers if why]:
        raise RuntimeError(f"on another rank: {reasons[0]}")
    return [made for made, _ in answers]


def _of_rank(task: Task, config: TrainConfig, batch: Any, accumulates: bool, ranks: Solo) -> Estimate:
    def measured(task: Task, accumulates: bool) -> dict[str, int]:
        if ranks.sharded:  # an unused first run: for an operation that it has not seen, DTensor allocates whole shapes
            _measured(task, config, batch, accumulates, ranks)
        return _measured(task, config, batch, accumulates, ranks)

    # Under zero1 a rank has the state of some parameters, which is not linear in the number of blocks.
    if task.depth is None or task.depth <= max(SHALLOW) or config.parallel.shard == "zero1":
        sizes = measured(task, accumulates)
    else:
        # Once gradients exist each part, and the peak of each part of a step, is linear in the blocks; if a rank has
        # parts it is so in any case, and gradients that are added up are whole.
        few, more = (measured(task.of_depth(n), accumulates or not ranks.sharded) for n in SHALLOW)
        blocks = (task.depth - SHALLOW[0]) / (SHALLOW[1] - SHALLOW[0])
        sizes = {name: round(size + blocks * (more[name] - size)) for name, size in few.items()}
    peak = max(sizes.pop("passes"), sizes.pop("update"))
    return Estimate(**sizes, peak=peak)


def _measured(task: Task, config: TrainConfig, batch: Any, accumulates: bool, ranks: Solo) -> dict[str, int]:
    """Returns the parts, and the peaks of the passes and of the optimizer's update.

    Two steps are taken, since an optimizer makes its state in the first; only the second has a window of several
    micro-batches, which then needs most.
    """
    fake, device = FakeTensorMode(allow_non_fake_inputs=True), pick_device(config.device)
    parts = ranks if ranks.sharded else ALONE  # replicas have the memory and the passes of a single process
    with fake, as_on(device), Live() as live:
        live.on_cpu = device.type == "cpu"
        model = prepare(built(task), "bf16" if config.precision == "fp8" else config.precision)
        model = parts.prepare(checkpointed(model, config.activations, draws=False), task)
        parameters = live.peak = live.now  # it is made on the host: temporary memory of that is gone
        optimizer, sent = ranks.optimizer(config.optim, model), ranks.rehearse(model)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        begun = live.now
        averages = config.average.name != "none" or config.optim.averages
        moving = [*params, *model.buffers()] if averages else []
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
            live.any_value = 1.0  # for a norm, or the number of the step
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
    """The needs of the requested micro-batch, and the largest size that fits `limit` bytes, found by halving.

    `fits` is None if not even one sample fits.
    """

    requested: Estimate
    size: int
    limit: int
    fits: int | None
    may_shrink: bool
    ranks: int = 1
    least: int = 1  # the smallest size that was tried

    @property
    def refused(self) -> bool:
        """Returns True if nothing fits, or only a smaller size than requested."""
        return self.fits is None or (self.fits < self.size and not self.may_shrink)

    def refusal(self) -> str:
        """Returns why the micro-batch cannot be trained on, and what would fit."""
        if self.fits is None:
            fix = f"not even {self.least} fits: make the model smaller, or take an optimizer that keeps less."
        else:
            fix = f"train.micro_batch_size={self.fits} would fit; with auto it is chosen."
        scope = f" on the largest of {self.ranks} ranks" if self.ranks > 1 else ""
        return (
            f"out of memory, by the estimate: a micro-batch of {self.size} needs{scope} {self.requested}; it may "
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
    """Reduces the micro-batch, from `size` on, until the estimate fits.

    `batch_of(size)` returns a batch of the task's data, used if `largest_batch` returns None, and `halved(size)` the
    next smaller size, or the same if there is none. Raises ConfigError if the loss reads values, or if a shape depends
    on values, and for ranks that cannot be estimated; other errors of the task as they are.
    """
    task = copy.copy(task)  # its model() may keep references to the simulated model

    def largest(size: int) -> Any:
        return batch_of(size) if (batch := task.largest_batch(size)) is None else batch

    size = min(size, config.largest_share)
    try:
        requested = needed = estimate(task, config, largest(size))
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
        if "Couldn't swap" in str(error):  # torch's error for fake parameters
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
    return Plan(requested, size, limit, fits if needed.peak <= limit else None, may_shrink, config.parallel.ranks, fits)


def _spelled(size: float) -> str:
    power, unit = (30, "GiB") if size >= 2**30 else (20, "MiB") if size >= 2**20 else (10, "KiB")
    return f"{size / 2**power:.{2 if power == 30 else 1}f} {unit}"


def _bytes(tensors: Iterable[Any]) -> int:
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    storages = [t.untyped_storage() for t in local if isinstance(t, Tensor)]
    return sum({identity(storage): storage.nbytes() for storage in storages}.values())  # FSDP's gradients share some
