"""ZeRO stages 2 and 3 by FSDP2: of every parameter each rank keeps a part, with its gradient and optimizer state."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from trainer.activations import blocks
from trainer.gradients import Window
from trainer.parallel.parts import Parts
from trainer.parallel.split import parallelize
from trainer.task import Task


class Sharded(Parts):
    """`fully_shard` on each block of the model and on the rest of it.

    Stage 3 gathers a block's parameters for its forward pass and again for its backward; stage 2 keeps them between
    the two. Parameters are sharded along their first dimension; with `tensor`, what each rank of a replica holds of
    them is. With `offload` a rank's parts, their gradients and the optimizer are in the host's memory, and so are the
    numbers that meet them.
    """

    _model: nn.Module

    def prepare(self, model: nn.Module, task: Task) -> nn.Module:
        if self.config.tensor > 1:
            parallelize(model, task, self.mesh["tensor"])
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.config.offload else OffloadPolicy()
        again = self.config.shard == "zero3"
        for module in (*blocks(model), model):
            fully_shard(module, mesh=self.mesh["data"], reshard_after_forward=again, offload_policy=offload)
        self._model = model
        return self._holds(model)

    def backward(self, last: bool) -> AbstractContextManager[object]:
        assert isinstance(self._model, FSDPModule)
        self._model.set_requires_gradient_sync(last)
        self._model.set_is_last_backward(last)
        return super().backward(last)

    @torch.no_grad()
    def total(self, window: Window, params: Sequence[nn.Parameter]) -> Window:
        """FSDP has divided the gradients by the number of ranks; what counts is their sum, over the global count."""
        torch._foreach_mul_(self.local([p.grad for p in params if p.grad is not None]), self.shares)
        found = super().total(window, params)
        return found.on(torch.device("cpu")) if self.config.offload else found
