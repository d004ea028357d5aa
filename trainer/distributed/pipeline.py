"""Pipeline parallelism: ranks hold successive stages of the model, through which a window's micro-batches pass.

The schedules are GPipe (Huang et al. 2019, arXiv 1811.06965), 1F1B (Narayanan et al. 2019, arXiv 1806.03377) and
interleaved (Narayanan et al. 2021, arXiv 2104.04473), in which a rank holds several stages: every p-th with p ranks.

torch.distributed.pipelining sends the tensors between stages. Every rank of a replica reads the same micro-batch and
calls `Task.loss` with it. The model called there computes the rank's stage from the output of the previous stage; on a
rank with several stages, the one whose turn it is. Only on the last stage does the call return; on the others an
exception leaves it with the output to send.

A stage may be divided further: by columns and rows (`trainer.distributed.tensor_parallel`), over the replicas
(`trainer.distributed.fsdp`), or both. Stage 2 of ZeRO then keeps parameters gathered from a window's first forward pass
to its last backward pass.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer.checkpoint.stored_tensors import Stored
from trainer.compat.pytree import tree_leaves, tree_map
from trainer.config import OptimConfig
from trainer.distributed.dtensor import Parts, alike, plan_explained
from trainer.distributed.fsdp import reduce_in_backward, shard
from trainer.distributed.group import outline
from trainer.distributed.pipeline_stages import Run, as_tuple, keep, skeleton, stages_of
from trainer.distributed.tensor_parallel import parallelize
from trainer.errors import ConfigError, TrainerError
from trainer.optim import build as optim
from trainer.ranks import NO_GRADIENT, put_back, values_of
from trainer.runtime.seeding import derive, seed_all
from trainer.runtime.tensors import left_out
from trainer.runtime.window import Window
from trainer.task import Loss, Task

_KEPT = 8  # schedules, each for one shape and number of micro-batches
_SENDS_PARTS = "get_mesh" in inspect.signature(PipelineStage).parameters  # DTensors, since torch 2.12


class _Sent(BaseException):
    """Raised to leave `Task.loss` on a stage that has no loss, with the stage's output."""

    def __init__(self, output: Any) -> None:
        self.output = output


class Pipeline(Parts):
    """A rank of a pipeline: rank 0 holds the first stage; the ranks of the last one know the losses and report them."""

    def prepare(self, model: nn.Module, task: Task) -> nn.Module:
        """Returns the same module without the tensors of other stages, so that names and checkpoints stay the same."""
        c, self._last, self.sharded = self.config, self.config.stages - 1, self.config.parts
        self._group = self.mesh.get_group("pipeline")
        self._stage_rank = self.mesh.get_local_rank("pipeline")
        self._speaks = self._speaks and self._stage_rank == c.pipeline - 1
        self._whole = skeleton(model)
        stages = dict(enumerate(stages_of(model, task, c.stages)))
        if c.tensor > 1:
            parallelize(model, task, self.mesh["tensor"])
        self._stages = {i: Run(*stages.pop(i)) for i in range(self._stage_rank, len(stages), c.pipeline)}  # this rank's
        keep(model, [*itertools.chain(*self._stages.values())], [*itertools.chain(*stages.values())])
        self._others = _names(self._whole) - _names(model)
        if c.shard != "none":
            for stage in self._stages.values():
                shard((*stage.owners(), stage), c, self.mesh["data"], self.device)
        model.forward = self._call
        self._schedules: dict[Any, Any] = {}
        self._terms: list[str] | None = None
        self._turn: tuple[int, tuple[Any, ...]] | None = None  # the running stage and its inputs
        return self._holds(model)

    def names(self, model: nn.Module) -> list[str]:
        return [name for name, _ in self._whole.named_parameters()]

    def optimizer(self, config: OptimConfig, model: nn.Module) -> Optimizer:
        """Returns the optimizer of this stage's parameters, in the groups that they have in the whole model."""
        optim.check(config, self._whole)
        names = {p: name for name, p in self._whole.named_parameters()}
        local, groups = dict(model.named_parameters()), []
        for group in optim.param_groups(self._whole, config):
            params = [local[names[p]] for p in group["params"] if names[p] in local]
            groups += [{**group, "params": params}] if params else []
        return optim.maker(config, sharded=self.sharded)(alike(groups))

    def passes(self, batches: Sequence[Any], loss_of: Callable[[int, Any], Loss]) -> Iterator[Loss]:
        """Yields the losses, only on the last stage; consecutive batches of equal shapes go through one schedule."""
        self._losses: dict[int, Loss] = {}
        self._loss = lambda i: loss_of(i, batches[i])
        self._left = dict.fromkeys(self._stages, len(batches))  # micro-batches whose backward pass is to come
        for stage in self._stages:
            self._reduce_after(stage, last=False)
        stop = 0
        for shapes, run in itertools.groupby(self._shapes(batches)):
            start, stop = stop, stop + len(list(run))
            with plan_explained():
                self._run(shapes, torch.arange(start, stop))
        yield from self._losses.values()

    def _shapes(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Returns the shapes of each micro-batch.

        If the replicas gather parameters for each pass, these are the shapes on all replicas, so that all run their
        passes in one order.
        """
        local = [_shapes(batch) for batch in batches]
        if self.config.shard != "zero3":
            return local
        self.beat()
        gathered: list[Any] = [None] * self.shares
        dist.all_gather_object(gathered, local, group=self.mesh.get_group("data"))
        return [*zip(*gathered, strict=True)]

    def backward_begins(self, stage: int) -> None:
        """Counts the start of one more micro-batch's backward pass."""
        self._left[stage] -= 1
        self._reduce_after(stage, last=self._left[stage] == 0)

    def _reduce_after(self, stage: int, *, last: bool) -> None:
        if self.config.shard != "none":
            reduce_in_backward(run := self._stages[stage], last)
            run.set_reshard_after_backward(last or self.config.shard == "zero3")  # type: ignore[operator]

    def _run(self, shapes: Any, numbers: Tensor) -> None:
        """Runs the micro-batches of these numbers forward and backward."""
        self._first, self._error = int(numbers[0]), None
        self._before = {i: values_of(stage) for i, stage in self._stages.items()}
        inputs = (numbers,) if 0 in self._stages else ()
        targets = numbers if self._last in self._stages else None
        try:
            self._schedule(shapes, len(numbers)).step(*inputs, target=targets, number=numbers, return_outputs=False)
        except RuntimeError as error:  # torch wraps what the task or a backward pass has raised
            cause = self._error or error.__cause__ or error
            raise cause from cause.__cause__

    def _schedule(self, shapes: Any, count: int) -> Any:
        key = shapes, count
        if key not in self._schedules:
            if len(self._schedules) == _KEPT:
                self._schedules.pop(next(iter(self._schedules)))
            stages = [_Counted(_Stage(self, i), i, self._last + 1, self.device, **self._means()) for i in self._stages]
            make: Any = self._kind(count)
            driven = stages if self.config.schedule == "interleaved" else stages[0]
            self._schedules[key] = make(driven, count, loss_fn=lambda loss, number: loss, scale_grads=False)
        return self._schedules[key]

    def _means(self) -> dict[str, Any]:
        """Returns the stages' process group, and the mesh over which parts of a sequence are divided on their way."""
        return {"group": self._group} | ({"get_mesh": lambda *_: self.mesh["tensor"]} if _SENDS_PARTS else {})

    def _kind(self, count: int) -> type[Any]:
        """Returns the schedule for `count` micro-batches; one that needs more of them is replaced by a simpler one."""
        ranks = self.config.pipeline
        if self.config.schedule == "interleaved":
            return ScheduleLoopedBFS if count % max(count // ranks, 1) else ScheduleInterleaved1F1B
        return ScheduleGPipe if self.config.schedule == "gpipe" or count < ranks else Schedule1F1B

    def forward(self, stage: int, received: tuple[Any, ...], number: int) -> Any:
        """Returns a stage's output for a micro-batch: the next stage's input, or the loss."""
        self.beat()
        if number == self._first:  # torch runs it twice, the first time to learn its shapes
            put_back(self._stages[stage], self._before[stage])
        self.stage, self._turn, self._calls = stage, (stage, received), 0
        try:
            loss = self._loss(number)
            if self._calls != 1:
                raise TrainerError(
                    f"Task.loss calls its model {self._calls} times, and a pipeline takes one call: put all that is to "
                    "go through the model into one batch, or set train.parallel.pipeline=1."
                )
            if not loss.sum.requires_grad and torch.is_grad_enabled():  # torch 2.11 learns shapes without gradients
                raise TrainerError(NO_GRADIENT)
        except _Sent as sent:
            return sent.output
        except Exception as error:
            self._error = error
            raise
        finally:
            self._turn = None
        self._losses[number] = loss
        return loss.sum

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the stage at work if the task calls the model within `forward`, and all stages otherwise."""
        if self._turn is None:
            return self._all_stages(args, kwargs)
        stage, received = self._turn
        self._calls += 1
        seed_all(derive(int(torch.randint(2**62, ())), "stage", stage))  # all stages have drawn alike up to here
        output = self._compute(stage, args, kwargs) if stage == 0 else self._compute(stage, received, {})
        if stage == self._last:
            return output
        if not _SENDS_PARTS and any(isinstance(tensor, DTensor) for tensor in tree_leaves(output)):
            raise ConfigError(
                f"torch {torch.__version__} sends no parts of a sequence from stage to stage: update torch, or leave "
                "'scatter' and 'sequence' out of parallel_plan."
            )
        raise _Sent(output)

    def _compute(self, stage: int, inputs: Any, kwargs: dict[str, Any]) -> Any:
        return self._stages[stage](*as_tuple(inputs), **kwargs)

    def _all_stages(self, inputs: Any, kwargs: dict[str, Any]) -> Any:
        """Returns the whole model's output on every rank of the replica, which evaluation needs."""
        for stage in range(self._last + 1):
            output = self._compute(stage, inputs, kwargs) if stage in self._stages else None
            inputs, kwargs = self._sent_to_all(output, stage % self.config.pipeline), {}
        return inputs

    def _sent_to_all(self, output: Any, stage_rank: int) -> Any:
        """Returns on all ranks the output of the rank `stage_rank` of the pipeline."""
        self.beat()
        sends = stage_rank == self._stage_rank
        box = [tree_map(_Kind.of, output) if sends else None]
        dist.broadcast_object_list(box, group=self._group, group_src=stage_rank, device=torch.device("cpu"))
        if not sends:
            output = tree_map(lambda kind: kind.empty(self.device, self.mesh), box[0])
        for tensor in self.local(tree_leaves(output)):
            dist.broadcast(tensor.detach(), group=self._group, group_src=stage_rank)
        return output

    @torch.no_grad()
    def total(self, window: Window, params: Sequence[nn.Parameter]) -> Window:
        if self._terms is None:
            box = [sorted(window.terms)]
            dist.broadcast_object_list(
                box, group=self._group, group_src=self.config.pipeline - 1, device=torch.device("cpu")
            )
            self._terms = box[0]
        terms = {name: window.terms.get(name, torch.zeros(())) for name in self._terms}
        return super().total(replace(window, terms=terms), params)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        self.beat()
        square = super().norm(gradients).square()
        dist.all_reduce(square, group=self._group)
        return square.sqrt()

    def merged(self, mine: dict[str, Any]) -> dict[str, Any]:
        self.beat()
        stages: list[Any] = [None] * self.config.pipeline
        dist.all_gather_object(stages, mine, group=self._group)
        return {name: value for stage in stages for name, value in stage.items()}

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns rank 0's state with names for all that the other stages save; other ranks' states unchanged."""
        self.beat()
        model, optimizer = state["model"], state["optimizer"]
        if "shared" in optimizer:
            raise ConfigError(
                f"{optimizer['of']} keeps numbers of all parameters together, of which each stage of a pipeline has "
                "some: set parallel.pipeline=1."
            )
        parts = {"model": model, **{key: optimizer.get(key, {}) for key in ("state", "groups")}}
        stages: list[Any] | None = [None] * self.config.pipeline if self._stage_rank == 0 else None
        dist.gather_object(tree_map(outline, parts), stages, group=self._group, group_dst=0)
        for others in stages or []:
            parts = {key: others[key] | part for key, part in parts.items()}
        optimizer |= {"state": parts["state"]} | ({"groups": parts["groups"]} if parts["groups"] else {})
        return state | {"model": parts["model"], "optimizer": optimizer}

    def take(self, path: tuple[str, ...], stored: Stored) -> Tensor | None:  # type: ignore[override]
        """Returns the stored tensor; None if another stage holds it, since `part` leaves that out."""
        return super().take(path, stored) if self._others.isdisjoint(path) else None

    def part(self, state: dict[str, Any]) -> dict[str, Any]:
        model, kept = (
            {name: value for name, value in named.items() if name not in self._others}
            for named in (state["model"], state["optimizer"]["state"])
        )
        return state | {"model": model, "optimizer": state["optimizer"] | {"state": kept}}


def _names(model: nn.Module) -> set[str]:
    """Returns the names of all tensors of the model that a checkpoint may hold."""
    return {*model.state_dict(), *(path for _, _, path, buffer in left_out(model) if buffer is not None)}


class _Stage(nn.Module):
    """`Pipeline.forward` of one stage as a module, which torch's schedules take."""

    def __init__(self, ranks: Pipeline, stage: int) -> None:
        super().__init__()
        self._ranks, self._stage, self._learning = ranks, stage, True

    def forward(self, *received: Any, number: Tensor) -> Any:
        if self._learning:  # torch's first call, to learn shapes, is uninitialized; class indices must be valid
            self._learning = False
            received = tuple(t if t.is_floating_point() else torch.zeros_like(t) for t in received)
        return self._ranks.forward(self._stage, received, int(number))

    def backward_begins(self) -> None:
        self._ranks.backward_begins(self._stage)


class _Counted(PipelineStage):
    """A PipelineStage that reports the start of each backward pass."""

    submod: _Stage

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        self.submod.backward_begins()
        return super().backward_maybe_with_nosync(*args, **kwargs)


@dataclass(frozen=True)
class _Kind:
    """A tensor's properties without its values; for a part of a sequence, also the whole's shape and stride."""

    shape: Sequence[int]
    dtype: torch.dtype
    part_of: tuple[Any, Any, Any] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> _Kind:
        if not isinstance(tensor, DTensor):
            return cls(tensor.shape, tensor.dtype)
        return cls(tensor.to_local().shape, tensor.dtype, (tensor.placements, tensor.shape, tensor.stride()))

    def empty(self, device: torch.device, mesh: DeviceMesh) -> Tensor:
        local = torch.empty(self.shape, dtype=self.dtype, device=device)
        if self.part_of is None:
            return local
        placements, shape, stride = self.part_of
        return DTensor.from_local(local, mesh["tensor"], placements, run_check=False, shape=shape, stride=stride)


def _shapes(batch: Any) -> tuple[Any, ...]:
    return tuple(leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
