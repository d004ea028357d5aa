"""ZeRO stage 1 (Rajbhandari et al. 2020, arXiv 1910.02054): replicas of the model, the optimizer's state divided."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from trainer import optim
from trainer.config import OptimConfig
from trainer.parallel.replicas import Replicas


class Zero1(Replicas):
    """DDP, and of every parameter one rank keeps the optimizer's state, steps it and sends it to the others."""

    def optimizer(self, config: OptimConfig, model: nn.Module) -> Optimizer:
        groups = optim.param_groups(model, config)
        optim.check(config, model)
        make: Any = optim.maker(config)  # called as the class would be
        return ZeroRedundancyOptimizer(groups, make, process_group=self.mesh.get_group("data"))

    def keeper(self, optimizer: Optimizer) -> Optimizer:
        return optimizer.optim  # type: ignore[attr-defined]

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's is whole; the others' stays as it is."""
        self.beat()
        state = super().whole(state)
        mine = state["optimizer"]["state"]
        parts: list[Any] | None = [None] * self.ranks if self.member.rank == 0 else None
        dist.gather_object(mine, parts, dst=0)
        for part in parts or []:
            mine = mine | part
        return state | {"optimizer": state["optimizer"] | {"state": mine}}
