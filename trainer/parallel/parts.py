"""What the kinds have in common under which a rank holds parts of parameters, as DTensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from trainer import optim
from trainer.config import OptimConfig
from trainer.parallel.several import Several


class Parts(Several):
    """A state of the whole model is gathered for a checkpoint and cut up when one is loaded."""

    sharded = True
    _shards: Mapping[str, DTensor]  # by the parameter's name

    def _holds(self, model: nn.Module) -> nn.Module:
        self._shards = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
        return model

    def optimizer(self, config: OptimConfig, model: nn.Module) -> Optimizer:
        """Over groups that hold either parts or whole parameters: torch's kernels take no mixture."""
        optim.check(config, model, sharded=True)
        groups = []
        for group in optim.param_groups(model, config):
            for parts in (True, False):
                params = [p for p in group["params"] if isinstance(p, DTensor) is parts]
                groups += [{**group, "params": params}] if params else []
        return optim.maker(config, sharded=True)(groups)

    def backward(self, last: bool) -> AbstractContextManager[object]:
        self.beat()
        return nullcontext()

    def local(self, tensors: list[Tensor]) -> list[Tensor]:
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]

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


def _gathered(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    return {key: _gathered(one) for key, one in value.items()} if isinstance(value, dict) else value
