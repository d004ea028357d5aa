"""Data parallelism: every rank holds the whole model, and DDP adds up the gradients while backward goes on."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from trainer.errors import ConfigError
from trainer.gradients import Window
from trainer.parallel.several import Several
from trainer.parallel.solo import put_back, values_of
from trainer.task import Loss, Task

_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


class Replicas(Several):
    """DDP."""

    _ddp: DistributedDataParallel

    def prepare(self, model: nn.Module, task: Task) -> nn.Module:
        c = self.config
        if self.device.type == "cpu" and (c.compression == "bf16" or c.sync_batchnorm):
            field = "sync_batchnorm=true" if c.sync_batchnorm else "compression=bf16"
            raise ConfigError(f"train.parallel.{field} needs a GPU and this run has none: leave it out.")
        return nn.SyncBatchNorm.convert_sync_batchnorm(model) if c.sync_batchnorm else model

    def module(self, model: nn.Module) -> nn.Module:
        c = self.config
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            process_group=self.mesh.get_group("data"),
            bucket_cap_mb=c.bucket_mb,
            static_graph=c.static_graph,
            find_unused_parameters=c.find_unused,
        )
        if c.compression != "none":
            self._ddp.register_comm_hook(self.mesh.get_group("data"), _HOOKS[c.compression])
        return self._ddp

    def warm_up(self, model: nn.Module, loss: Callable[[], Loss]) -> None:
        """One backward pass for nothing: after its first, DDP lays its buckets out anew, and with them the order in
        which gradients are added up. A resumed run would have its first elsewhere."""
        before = values_of(model)
        for _ in range(2):  # the layout is made by the first backward and put in place by the second forward
            loss().sum.backward()
            model.zero_grad()
        dist.barrier()
        put_back(model, before)

    @torch.no_grad()
    def total(self, window: Window, params: Sequence[nn.Parameter]) -> Window:
        """DDP has divided the gradients by the number of ranks; what counts is their sum, over the global count."""
        torch._foreach_mul_([p.grad for p in params if p.grad is not None], self.ranks)
        return super().total(window, params)

    def backward(self, last: bool) -> AbstractContextManager[object]:
        if not last:
            return self._ddp.no_sync()
        self.beat()
        return nullcontext()
