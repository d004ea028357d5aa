"""Data parallelism: every rank holds the whole model, and DDP sums the gradients during the backward pass."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from trainer.compat import foreach
from trainer.compat.parallel import timed_of
from trainer.distributed.group import Several
from trainer.distributed.powersgd import PowerSGD
from trainer.errors import ConfigError
from trainer.ranks import put_back, values_of
from trainer.runtime.window import Window
from trainer.task import Loss, Task

_HOOKS = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "powersgd": noop_hook,  # gradients stay local until `total` reduces them
}


class Replicas(Several):
    """A rank that holds a replica of the model under DDP."""

    _ddp: DistributedDataParallel
    _low_rank: PowerSGD | None = None

    def prepare(self, model: nn.Module, task: Task) -> nn.Module:
        c = self.config
        if self.device.type == "cpu" and (c.compression == "bf16" or c.sync_batchnorm):
            field = "sync_batchnorm=true" if c.sync_batchnorm else "compression=bf16"
            raise ConfigError(f"train.parallel.{field} needs a GPU and this run has none: leave it out.")
        self._model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if c.sync_batchnorm else model
        return self._model

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
        self._compress(self._model)
        return self._ddp

    def _compress(self, model: nn.Module) -> None:
        if self.config.compression == "powersgd":
            self._low_rank = PowerSGD(model, self.config.powersgd_rank, self.shares, self.sum_over_replicas)

    def rehearse(self, model: nn.Module) -> list[Tensor]:
        """Returns tensors as large as DDP's buckets, which match the gradients, and as their compressed copies."""
        self._compress(model)
        sent = {"fp16": [torch.float16], "bf16": [torch.bfloat16]}.get(self.config.compression, [])
        trainable = [p for p in model.parameters() if p.requires_grad]
        return [torch.empty_like(p, dtype=dtype) for dtype in (None, *sent) for p in trainable]

    def warm_up(self, model: nn.Module, loss: Callable[[], Loss]) -> None:
        """Runs backward passes whose gradients are dropped, so that DDP fixes its buckets.

        After its first backward pass DDP rebuilds its buckets, and with them the order in which gradients are summed. A
        resumed run would have its first pass at another step.
        """
        before = values_of(model)
        for _ in range(2):  # the first backward computes the layout, the second forward applies it
            loss().sum.backward()
            model.zero_grad()
        dist.barrier()
        put_back(model, before)

    @torch.no_grad()
    def total(self, window: Window, params: Sequence[nn.Parameter]) -> Window:
        window = super().total(window, params)
        self.reduce(params, window.count)
        return window

    @torch.no_grad()
    def reduce(self, params: Sequence[nn.Parameter], count: float | Tensor) -> None:
        """Turns the gradients into their sum over the global count; DDP has divided them by the number of ranks."""
        if self._low_rank is not None:
            self._low_rank.reduce(count)
        else:
            foreach.mul_([p.grad for p in params if p.grad is not None], self.ranks)

    def communication(self) -> dict[str, float]:
        """Returns the share of the forward and backward time that was spent only waiting for gradients of other ranks.

        DDP times its first ten passes and then each hundredth one; the share is of their averages.
        """
        timed = timed_of(self._ddp)
        if self._low_rank is not None or not timed.get("avg_backward_compute_time"):  # PowerSGD sends after them
            return {}
        hidden = timed["avg_backward_compute_comm_overlap_time"]
        waited = max(timed["avg_backward_comm_time"] - hidden, 0)
        computed = timed["avg_forward_compute_time"] + timed["avg_backward_compute_time"]
        return {"time/communication_share": waited / (computed + waited)}

    def backward(self, last: bool) -> AbstractContextManager[object]:
        if not last:
            return self._ddp.no_sync()
        self.beat()
        return nullcontext()

    @property
    def suffix(self) -> str:  # type: ignore[override]
        """Returns no suffix for rank 0, which writes what all ranks hold alike, as a single process does."""
        return "" if self.first else super().suffix

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        state_here = state if self.first else {}
        if self._low_rank is None:
            return state_here
        kept = self._low_rank.state(self._stacked)
        return state_here | {"compression": kept if self.first else {"left_out": kept["left_out"]}}

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns rank 0's state with every rank's compiled shapes, since each compiles for its own batches."""
        whole = super().whole(state)
        if "compiled" in state:
            whole |= {"compiled": [shapes for [shapes] in self.everyone(state["compiled"])]}
        return whole

    def mine(self, tensor: Tensor) -> tuple[Tensor | None, Sequence[int] | None]:
        if isinstance(tensor, DTensor):  # made by `_stacked`
            return tensor.to_local(), [self.share, *[0] * (tensor.ndim - 1)]
        return super().mine(tensor)

    def part(self, state: dict[str, Any]) -> dict[str, Any]:
        if self._low_rank is not None and "compression" in state:
            self._low_rank.load(state["compression"], self.share)
        shapes = state.get("compiled", [])
        return state | {"compiled": [shapes[self.share]] if len(shapes) == self.shares else [[]]}

    def _stacked(self, tensor: Tensor) -> Tensor:
        """Returns the replicas' tensors stacked along a new first dimension, of which this rank holds its own."""
        return DTensor.from_local(tensor.unsqueeze(0), self.mesh["data"], [Shard(0)], run_check=False)
