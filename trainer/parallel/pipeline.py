"""Pipeline parallelism (GPipe: Huang et al. 2019, arXiv 1811.06965; 1F1B: Narayanan et al. 2019, arXiv 1806.03377):
ranks hold successive stages of the model, and a window's micro-batches follow one another through them.

torch.distributed.pipelining sends what passes between the stages. Every rank of a replica reads the same micro-batch
and calls `Task.loss` with it: the model that is called there computes the rank's stage, from what the stage before has
sent. Only on the last stage does the call return; the others leave it with what they have to send.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from trainer import optim
from trainer.config import OptimConfig
from trainer.errors import ConfigError, TrainerError
from trainer.gradients import Window
from trainer.parallel.several import Several
from trainer.parallel.solo import NO_GRADIENT, put_back, values_of
from trainer.parallel.stages import keep, skeleton, stages_of
from trainer.seeding import derive, seed_all
from trainer.task import Loss, Task

_KEPT = 8  # schedules, each for one shape of micro-batches and one number of them


class _Sent(BaseException):
    """Leaves `Task.loss` on a stage that has no loss, with what it has computed."""

    def __init__(self, output: Any) -> None:
        self.output = output


class Pipeline(Several):
    """Rank 0 holds the first stage; the ranks of the last one know the losses and speak."""

    def prepare(self, model: nn.Module, task: Task) -> nn.Module:
        """The same module without the tensors of other stages, so that names, and with them checkpoints, stay."""
        self._stage, self._last = self.mesh.get_local_rank("pipeline"), self.config.pipeline - 1
        self._group = self.mesh.get_group("pipeline")
        self._speaks = self._stage == self._last
        self._whole = skeleton(model)
        stages = stages_of(model, task, self.config.pipeline)
        self._parts = stages.pop(self._stage)
        keep(model, self._parts, [*itertools.chain(*stages)])
        model.forward = self._call
        self._model = model
        self._schedules: dict[Any, PipelineScheduleSingle] = {}
        self._terms: list[str] | None = None
        self._received: tuple[Any, ...] | None = None  # by this stage, of the micro-batch at hand
        return model

    def names(self, model: nn.Module) -> list[str]:
        return [name for name, _ in self._whole.named_parameters()]

    def optimizer(self, config: OptimConfig, model: nn.Module) -> Optimizer:
        """Over this stage's parameters, in the groups that they have in the whole model."""
        if config.name == "sophia":
            raise ConfigError(
                "train.optim.name is 'sophia', which differentiates through the whole model, and "
                f"train.parallel.pipeline is {self._last + 1}: choose adamw or lion, or pipeline=1."
            )
        optim.check(config, self._whole, sharded=False)
        names = {p: name for name, p in self._whole.named_parameters()}
        mine, groups = dict(model.named_parameters()), []
        for group in optim.param_groups(self._whole, config):
            params = [mine[names[p]] for p in group["params"] if names[p] in mine]
            groups += [{**group, "params": params}] if params else []
        return optim.maker(config)(groups)

    def passes(self, batches: Sequence[Any], loss_of: Callable[[int, Any], Loss]) -> Iterator[Loss]:
        """Neighbours of equal shapes go through one schedule; losses come out of the last stage alone."""
        self._losses: dict[int, Loss] = {}
        self._loss = lambda i: loss_of(i, batches[i])
        stop = 0
        for shapes, run in itertools.groupby(map(_shapes, batches)):
            start, stop = stop, stop + len(list(run))
            self._run(shapes, torch.arange(start, stop))
        yield from self._losses.values()

    def _run(self, shapes: Any, numbers: Tensor) -> None:
        """The micro-batches of these numbers, forward and backward."""
        self._first, self._before, self._error = int(numbers[0]), values_of(self._model), None
        inputs = (numbers,) if self._stage == 0 else ()
        targets = numbers if self._stage == self._last else None
        try:
            self._schedule(shapes, len(numbers)).step(*inputs, target=targets, number=numbers, return_outputs=False)
        except RuntimeError:  # torch's own, around whatever the task has raised
            if self._error is None:
                raise
            raise self._error from None

    def _schedule(self, shapes: Any, count: int) -> PipelineScheduleSingle:
        key = shapes, count
        if key not in self._schedules:
            if len(self._schedules) == _KEPT:
                self._schedules.pop(next(iter(self._schedules)))
            kind = ScheduleGPipe if self.config.schedule == "gpipe" or count <= self._last else Schedule1F1B
            stage = PipelineStage(_Stage(self), self._stage, self._last + 1, self.device, group=self._group)
            self._schedules[key] = kind(stage, count, loss_fn=lambda loss, number: loss, scale_grads=False)
        return self._schedules[key]

    def forward(self, received: tuple[Any, ...], number: int) -> Any:
        """What this stage makes of a micro-batch: the next one's input, or the loss."""
        self.beat()
        if number == self._first:  # which torch asks for twice, the first time to learn its shapes
            put_back(self._model, self._before)
        self._received, self._calls = received, 0
        try:
            loss = self._loss(number)
            if self._calls != 1:
                raise TrainerError(
                    f"Task.loss calls its model {self._calls} times, and a pipeline takes one call: put all that is to "
                    "go through the model into one batch, or set train.parallel.pipeline=1."
                )
            if not loss.sum.requires_grad:
                raise TrainerError(NO_GRADIENT)
        except _Sent as sent:
            return sent.output
        except Exception as error:
            self._error = error
            raise
        finally:
            self._received = None
        self._losses[number] = loss
        return loss.sum

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """The model, as the task calls it: within `forward` this stage of it, else all stages."""
        if self._received is None:
            return self._all_stages(args, kwargs)
        self._calls += 1
        seed_all(derive(int(torch.randint(2**62, ())), "stage", self._stage))  # all stages have drawn alike up to here
        output = self._compute(args, kwargs) if self._stage == 0 else self._compute(self._received, {})
        if self._stage == self._last:
            return output
        raise _Sent(output)

    def _compute(self, inputs: Any, kwargs: dict[str, Any]) -> Any:
        for part in self._parts:
            inputs, kwargs = part(*_as_tuple(inputs), **kwargs), {}
        return inputs

    def _all_stages(self, inputs: Any, kwargs: dict[str, Any]) -> Any:
        """The whole model's output on every rank of the replica: evaluation needs it at hand."""
        for stage in range(self._last + 1):
            output = self._compute(inputs, kwargs) if stage == self._stage else None
            inputs, kwargs = self._sent_to_all(output, stage), {}
        return inputs

    def _sent_to_all(self, output: Any, stage: int) -> Any:
        self.beat()
        mine = stage == self._stage
        box = [tree_map(lambda t: torch.empty_like(t, device="meta"), output) if mine else None]
        dist.broadcast_object_list(box, group=self._group, group_src=stage, device=torch.device("cpu"))
        if not mine:
            output = tree_map(lambda t: torch.empty_like(t, device=self.device), box[0])
        for tensor in tree_leaves(output):
            dist.broadcast(tensor.detach(), group=self._group, group_src=stage)
        return output

    @torch.no_grad()
    def total(self, window: Window, params: Sequence[nn.Parameter]) -> Window:
        self.sum_over_replicas([p.grad for p in params if p.grad is not None])
        if self._terms is None:
            box = [sorted(window.terms)]
            dist.broadcast_object_list(box, group=self._group, group_src=self._last, device=torch.device("cpu"))
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
        stages: list[Any] = [None] * (self._last + 1)
        dist.all_gather_object(stages, mine, group=self._group)
        return {name: value for stage in stages for name, value in stage.items()}

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's is whole; the others' stays as it is."""
        self.beat()
        mine = tree_map(
            lambda x: x.cpu() if isinstance(x, Tensor) else x, (state["model"], state["optimizer"]["state"])
        )
        stages: list[Any] | None = [None] * (self._last + 1) if self._stage == 0 else None
        dist.gather_object(mine, stages, group=self._group, group_dst=0)
        for model, kept in stages or []:
            mine = mine[0] | model, mine[1] | kept
        return state | {"model": mine[0], "optimizer": state["optimizer"] | {"state": mine[1]}}

    def part(self, state: dict[str, Any]) -> dict[str, Any]:
        others = self._whole.state_dict().keys() - self._model.state_dict().keys()
        model, kept = (
            {name: value for name, value in named.items() if name not in others}
            for named in (state["model"], state["optimizer"]["state"])
        )
        return state | {"model": model, "optimizer": state["optimizer"] | {"state": kept}}


class _Stage(nn.Module):
    """`Pipeline.forward` as a module, which torch's schedules take."""

    def __init__(self, ranks: Pipeline) -> None:
        super().__init__()
        self._ranks = ranks

    def forward(self, *received: Any, number: Tensor) -> Any:
        return self._ranks.forward(received, int(number))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _shapes(batch: Any) -> tuple[Any, ...]:
    return tuple(leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
