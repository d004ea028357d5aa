"""ZeRO stages 2 and 3 by FSDP2: each rank keeps a part of every parameter, its gradient and optimizer state."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from trainer.config import ParallelConfig
from trainer.distributed.dtensor import Parts
from trainer.distributed.tensor_parallel import parallelize
from trainer.model.checkpointing import blocks
from trainer.model.norms import NORMS
from trainer.task import Task


class Sharded(Parts):
    """A rank that applies `fully_shard` to each block of the model and to the rest of it.

    Stage 3 gathers a block's parameters for its forward pass and again for its backward pass; stage 2 keeps them
    between the two. Parameters are sharded along their first dimension; with `tensor`, each rank's part of a replica's
    parameters is sharded. With `offload` a rank's parts, their gradients and the optimizer are in host memory, and so
    are the numbers computed with them.
    """

    _model: nn.Module

    def prepare(self, model: nn.Module, task: Task) -> nn.Module:
        if self.config.tensor > 1:
            parallelize(model, task, self.mesh["tensor"])
        shard((*blocks(model), model), self.config, self.mesh["data"], self.device)
        self._model = model
        return self._holds(model)

    def backward(self, last: bool) -> AbstractContextManager[object]:
        reduce_in_backward(self._model, last)
        return super().backward(last)


def shard(modules: Iterable[nn.Module], config: ParallelConfig, mesh: DeviceMesh, device: torch.device) -> None:
    """Divides the parameters of each module over `mesh`; an outer module gets the parameters that its inner ones
    lack."""
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if config.offload else OffloadPolicy()
    modules, plain = list(modules), MixedPrecisionPolicy()
    mixed = plain  # autocast casts the modules' inputs
    norms: list[nn.Module] = []  # these compute in fp32
    if config.gather == "bf16":
        mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        candidates = dict.fromkeys(part for module in modules for part in module.modules() if isinstance(part, NORMS))
        norms = [norm for norm in candidates if next(norm.parameters(), None) is not None]
    reshard = config.shard == "zero3"
    for module in dict.fromkeys((*norms, *modules)):
        policy = plain if module in norms else mixed
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)


def reduce_in_backward(model: nn.Module, last: bool) -> None:
    """Makes later backward passes reduce the gradients if `last`, or else accumulate them on each rank."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)
