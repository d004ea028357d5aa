"""Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053): ranks hold columns or rows of the same layers.

The layers are those that the task's `parallel_plan` names; DTensor does the communication between them. Where there
are replicas as well, the gradients are added up over them after the last backward pass.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from trainer.errors import ConfigError
from trainer.gradients import Window
from trainer.parallel.parts import Parts
from trainer.task import Task

_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


class Split(Parts):
    """The ranks of one replica see the same samples and the same seeds; one of them speaks for it."""

    def prepare(self, model: nn.Module, task: Task) -> nn.Module:
        parallelize(model, task, self.mesh["tensor"])
        return self._holds(model)

    @torch.no_grad()
    def total(self, window: Window, params: Sequence[nn.Parameter]) -> Window:
        self.sum_over_replicas(self.local([p.grad for p in params if p.grad is not None]))
        return super().total(window, params)


def parallelize(model: nn.Module, task: Task, mesh: DeviceMesh) -> None:
    """Divide the layers that the task's plan names over `mesh`; raises ConfigError for one that cannot be followed."""
    parallelize_module(model, mesh, _plan(model, task, mesh.size()))


def _plan(model: nn.Module, task: Task, ranks: int) -> dict[str, ParallelStyle]:
    """The task's plan by the modules' full names."""
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
            if isinstance(module, nn.Linear) and weight.shape[style == "rowwise"] % ranks:
                raise ConfigError(
                    f"{name}.parallel_plan divides {path!r} {style}, and {tuple(weight.shape)} does not come out even "
                    f"for train.parallel.tensor={ranks}: leave it out of the plan, or change its size."
                )
            found[path] = _STYLES[style]()
    return found
