"""ZeRO stage 1 (Rajbhandari et al. 2020, arXiv 1910.02054): replicas of the model, the optimizer's state divided."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from trainer.config import OptimConfig
from trainer.distributed.ddp import Replicas
from trainer.distributed.group import outline
from trainer.errors import ConfigError
from trainer.optim import build as optim
from trainer.optim.kept import same


class Zero1(Replicas):
    """DDP, and of every parameter one rank keeps the optimizer's state, steps it and sends it to the others."""

    def optimizer(self, config: OptimConfig, model: nn.Module) -> Optimizer:
        groups = optim.param_groups(model, config)
        optim.check(config, model)
        make: Any = optim.maker(config)  # called as the class would be
        return ZeroRedundancyOptimizer(groups, make, process_group=self.mesh.get_group("data"))

    def keeper(self, optimizer: Optimizer) -> Optimizer:
        return optimizer.optim  # type: ignore[attr-defined]

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        return super().own(state) | {"optimizer": state["optimizer"]}

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        self.beat()
        mine = super().whole(state)
        kept, groups = mine["optimizer"]["state"], mine["optimizer"].get("groups", {})
        of_all: list[Any] | None = [None] * self.ranks if self.first else None
        dist.gather_object((tree_map(outline, kept), groups), of_all, dst=0)
        for others, theirs in of_all or []:
            kept = others | kept
            if not same(groups, theirs):
                raise ConfigError(
                    f"{mine['optimizer']['of']} keeps numbers in its param_groups that differ from rank to rank, since "
                    "under parallel.shard=zero1 each rank steps some of the parameters: use shard=none."
                )
        return mine | {"optimizer": mine["optimizer"] | {"state": kept}}
