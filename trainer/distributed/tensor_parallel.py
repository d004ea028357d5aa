"""Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053): ranks hold columns or rows of the same layers.

The task's `parallel_plan` names the layers; DTensor does the communication between them. With several replicas, the
gradients are summed over them after the last backward pass. Norms and dropout may work on parts of the sequence
(`trainer.distributed.sequence_parallel`).
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module

from trainer.distributed.dtensor import Parts
from trainer.distributed.sequence_parallel import ELEMENTWISE, Columns, Elementwise, Gather, RowsScatter, Scatter
from trainer.errors import ConfigError
from trainer.task import Task

_LAYERS = (nn.Linear, nn.Embedding)
_STYLES: dict[str, tuple[type[ParallelStyle], tuple[type[nn.Module], ...]]] = {  # with the modules that can have each
    "colwise": (Columns, _LAYERS),
    "rowwise": (RowwiseParallel, _LAYERS),
    "rowwise_scatter": (RowsScatter, _LAYERS),
    "sequence": (Elementwise, ELEMENTWISE),
    "scatter": (Scatter, (nn.Module,)),
    "gather": (Gather, (nn.Module,)),
}
_DIVIDED = {"colwise": 0, "rowwise": 1, "rowwise_scatter": 1}  # dimension of a linear layer's weight


class Split(Parts):
    """A rank of tensor parallelism: ranks of a replica see the same samples and seeds, and one reports for all."""

    def prepare(self, model: nn.Module, task: Task) -> nn.Module:
        parallelize(model, task, self.mesh["tensor"])
        return self._holds(model)


def parallelize(model: nn.Module, task: Task, mesh: DeviceMesh) -> None:
    """Divides the layers that the task's plan names over `mesh`; raises ConfigError if the plan cannot be followed."""
    parallelize_module(model, mesh, _plan(model, task, mesh.size()))


def _plan(model: nn.Module, task: Task, ranks: int) -> dict[str, ParallelStyle]:
    """Returns the task's plan by the modules' full names."""
    plan, styles = task.parallel_plan(model), {}
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
                f"'layers.*.up', and one of {', '.join(_STYLES)}."
            )
        for path, module in matching.items():
            _check(f"{name}.parallel_plan", path, module, style, ranks)
            styles[path] = _STYLES[style][0]()
    return styles


def _check(plan: str, path: str, module: nn.Module, style: str, ranks: int) -> None:
    kinds = _STYLES[style][1]
    if not isinstance(module, kinds):
        missing = " and ".join(f"no nn.{kind.__name__}" for kind in kinds)
        raise ConfigError(f"{plan} names {path!r} {style}, which is {missing}: leave it out of the plan.")
    if isinstance(module, nn.Linear) and style in _DIVIDED and module.weight.shape[_DIVIDED[style]] % ranks:
        raise ConfigError(
            f"{plan} divides {path!r} {style}, and {tuple(module.weight.shape)} does not come out even "
            f"for train.parallel.tensor={ranks}: leave it out of the plan, or change its size."
        )
