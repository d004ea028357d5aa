"""ZeRO stages 2 and 3 by FSDP2: of every parameter each rank keeps a part, with its gradient and optimizer state."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from trainer import optim
from trainer.config import OptimConfig
from trainer.gradients import Window
from trainer.parallel.several import Several


class Sharded(Several):
    """`fully_shard` on each block of the model and on the rest of it.

    Stage 3 gathers a block's parameters for its forward pass and again for its backward; stage 2 keeps them between
    the two. Parameters are sharded along their first dimension.
    """

    sharded = True
    _model: nn.Module
    _shards: Mapping[str, DTensor]

    def prepare(self, model: nn.Module) -> nn.Module:
        for module in (*_blocks(model), model):
            fully_shard(module, mesh=self.mesh["data"], reshard_after_forward=self.config.shard == "zero3")
        self._model = model
        self._shards = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
        return model

    def optimizer(self, config: OptimConfig, model: nn.Module) -> Optimizer:
        return optim.build(config, model, sharded=True)

    def backward(self, last: bool) -> AbstractContextManager[object]:
        assert isinstance(self._model, FSDPModule)
        self._model.set_requires_gradient_sync(last)
        self._model.set_is_last_backward(last)
        self.beat()
        return nullcontext()

    @torch.no_grad()
    def total(self, window: Window, params: Sequence[nn.Parameter]) -> Window:
        """FSDP has divided the gradients by the number of ranks; what counts is their sum, over the global count."""
        torch._foreach_mul_([local(p.grad) for p in params if p.grad is not None], self.shares)
        return super().total(window, params)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        self.beat()
        norm = super().norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """On every rank, so that all of them gather the same tensors in the same order."""
        self.beat()
        return _gathered(state)

    def part(self, state: dict[str, Any]) -> dict[str, Any]:
        """Below a parameter's name, a tensor of its shape becomes this rank's part of it."""
        return self._cut(state, None)

    def _cut(self, value: Any, like: DTensor | None) -> Any:
        if isinstance(value, dict):
            return {key: self._cut(one, self._shards.get(key, like)) for key, one in value.items()}
        if not isinstance(value, Tensor) or like is None or value.shape != like.shape:
            return value
        return distribute_tensor(value.to(self.device), like.device_mesh, like.placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists and sequences of modules: the layers of a transformer or a perceptron."""
    for child in module.children():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            yield from _blocks(child)
        elif any(p.requires_grad for p in child.parameters()):
            yield child


def _gathered(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    return {key: _gathered(one) for key, one in value.items()} if isinstance(value, dict) else value
