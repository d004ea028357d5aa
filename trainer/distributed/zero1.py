"""Implements ZeRO stage 1 (Rajbhandari et al. 2020, arXiv 1910.02054): replicas of the model, with the optimizer's
state divided."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from trainer.compat.pytree import tree_map
from trainer.config import OptimConfig
from trainer.distributed.ddp import Replicas
from trainer.distributed.group import outline
from trainer.errors import ConfigError
from trainer.optim import build as optim
from trainer.optim.optimizer_state import same


class Zero1(Replicas):
    """DDP in which each parameter's optimizer state is on one rank, which steps it and sends it to the others."""

    def optimizer(self, config: OptimConfig, model: nn.Module) -> Optimizer:
        groups = optim.param_groups(model, config)
        optim.check(config, model)
        make: Any = optim.maker(config)  # called like the class
        return ZeroRedundancyOptimizer(groups, make, process_group=self.mesh.get_group("data"))

    def keeper(self, optimizer: Optimizer) -> Optimizer:
        return optimizer.optim  # type: ignore[attr-defined]

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        optimizer = state["optimizer"]
        parts = optimizer if self.first else {key: optimizer[key] for key in ("of", "state")}
        return super().own(state) | {"optimizer": parts}

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        self.beat()
        merged = super().whole(state)
        kept = merged["optimizer"]["state"]
        alike = {key: state["optimizer"].get(key, {}) for key in ("groups", "shared")}
        gathered: list[Any] | None = [None] * self.ranks if self.first else None
        dist.gather_object((tree_map(outline, kept), alike), gathered, dst=0)
        for others, _ in gathered or []:
            kept = others | kept
        if not self.agree(all(same(alike, theirs) for _, theirs in gathered or [])):
            raise ConfigError(
                f"{merged['optimizer']['of']} keeps numbers of several parameters that differ from rank to rank, since "
                "under parallel.shard=zero1 each rank steps some of the parameters: use shard=none."
            )
        return merged | {"optimizer": merged["optimizer"] | {"state": kept}}
