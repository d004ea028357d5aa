"""Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053): ranks hold columns or rows of the same layers.

The layers are those that the task's `parallel_plan` names; DTensor does the communication between them. Where there
are replicas as well, the gradients are added up over them after the last backward pass.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from trainer.errors import ConfigError
from trainer.gradients import Window
from trainer.parallel.parts import Parts
from trainer.task import Task

_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


class Split(Parts):
    """The ranks of one replica see the same samples and the same seeds; one of them speaks for it."""

    def prepare(self, model: nn.Module, task: Task) -> nn.Module:
        parallelize_module(model, self.mesh["tensor"], _plan(model, task, self.config.tensor))
        return self._holds(model)

    @torch.no_grad()
    def total(self, window: Window, params: Sequence[nn.Parameter]) -> Window:
        gradients = self.local([p.grad for p in params if p.grad is not None])
        if self.shares > 1 and gradients:
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat, group=self.mesh.get_group("data"))
            sums = flat.split([g.numel() for g in gradients])
            torch._foreach_copy_(gradients, [s.view_as(g) for s, g in zip(sums, gradients, strict=True)])
        return super().total(window, params)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """What all ranks hold counts once, parts count on each: torch's own takes no mixture of the two."""
        self.beat()
        parts: list[Tensor] = [g for g in gradients if _is_part(g)]
        rest = [g for g in gradients if not _is_part(g)]
        square = super().norm(self.local(parts)).square()
        dist.all_reduce(square, group=self.mesh.get_group("tensor"))
        return (square + super().norm(self.local(rest)).square()).sqrt()


def _is_part(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)


def _plan(model: nn.Module, task: Task, ranks: int) -> dict[str, ParallelStyle]:
    """The task's plan by the modules' full names; raises ConfigError for one that cannot be followed."""
    plan, found = task.parallel_plan(model), {}
    name = type(task).__name__
    if not plan:
        raise ConfigError(
            f"train.parallel.tensor is {ranks}, and {name} has no parallel_plan(model): write one, or use shard=zero3."
        )
    for pattern, style in plan.items():
        matching = {path: module for path, module in model.named_modules() if fnmatchcase(path, pattern)}
        if style not in _STYLES or not matching:
            raise ConfigError(
                f"{name}.parallel_plan has {pattern!r}: {style!r}: give a pattern of module names, such as "
                "'layers.*.up', and colwise or rowwise."
            )
        for path, module in matching.items():
            weight = getattr(module, "weight", None)
            if not isinstance(module, (nn.Linear, nn.Embedding)) or not isinstance(weight, Tensor):
                raise ConfigError(f"{name}.parallel_plan names {path!r}, which is no nn.Linear and no nn.Embedding.")
            found[path] = _STYLES[style]()
    return found
