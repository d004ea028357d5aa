"""Expert parallelism (Lepikhin et al. 2020, arXiv 2006.16668, section 3.2): ranks hold different experts of a layer.

Replicas form groups that share the experts, and see different samples. A rank sends each of its tokens to the rank that
holds the token's expert, and gets the output back. So an expert's gradient is that of its whole group's tokens, and is
summed over the ranks that hold the same expert; all other gradients are summed over all replicas.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer.compat.parallel import all_to_all
from trainer.compat.tensors import is_fake
from trainer.config import ParallelConfig
from trainer.distributed.dtensor import Parts
from trainer.distributed.member import Member
from trainer.errors import ConfigError
from trainer.task import Task


class Exchange:
    """The way to the experts of a group of ranks, of which each holds as many, in order."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group, self._ranks = mesh.get_group(), mesh.size()

    def computed(
        self, rows: Tensor, sizes: Sequence[int], compute: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    ) -> Tensor:
        """Returns the outputs [rows, hidden] of rows in the order of their experts, `sizes[k]` for expert k.

        `compute` takes the rows of each expert that this rank holds, from all ranks, and returns their outputs.
        """
        local = len(sizes) // self._ranks
        sent = [list(sizes[first : first + local]) for first in range(0, len(sizes), local)]
        arrived = self._arriving(sent, rows)
        there, here = ([sum(counts) for counts in of_rank] for of_rank in (sent, arrived))
        pieces = all_to_all(rows, here, there, self._group).split([count for counts in arrived for count in counts])
        outputs = compute([torch.cat(pieces[expert::local]) for expert in range(local)])
        by_expert = [output.split([counts[k] for counts in arrived]) for k, output in enumerate(outputs)]
        by_rank = torch.cat([by_expert[expert][rank] for rank in range(self._ranks) for expert in range(local)])
        return all_to_all(by_rank, there, here, self._group)

    def _arriving(self, sent: list[list[int]], rows: Tensor) -> list[list[int]]:
        """Returns how many rows each rank sends for each expert of this one, whose own numbers are `sent`.

        Tensors without values are taken to be the same on all ranks.
        """
        if is_fake(rows):
            return [sent[0]] * self._ranks
        counts = torch.tensor(sent, device=rows.device)
        arrived = torch.empty_like(counts)
        dist.all_to_all_single(arrived, counts, group=self._group)
        return arrived.tolist()


class Owners(Parts):
    """A rank that holds some of each layer's experts, and everything else whole."""

    _dims = ("copies", "expert")

    def __init__(self, config: ParallelConfig, member: Member, device: torch.device) -> None:
        super().__init__(config, member, device)
        shape = (config.data // config.expert, config.expert)
        self._layout = init_device_mesh(device.type, shape, mesh_dim_names=self._dims)

    @property
    def layout(self) -> DeviceMesh:
        return self._layout

    def prepare(self, model: nn.Module, task: Task) -> nn.Module:
        mesh, modules, name = self.layout["expert"], task.expert_plan(model), type(task).__name__
        if not modules:
            raise ConfigError(
                f"train.parallel.expert is {mesh.size()}, and {name}.expert_plan(model) names no module: let it return "
                "those with experts, or leave train.parallel.expert out."
            )
        for module in modules:
            for path, weight in [*module.named_parameters(recurse=False)]:
                if weight.shape[0] % mesh.size():
                    raise ConfigError(
                        f"{name}.expert_plan has a module with {weight.shape[0]} experts, which do not come out even "
                        f"for train.parallel.expert={mesh.size()}: change one of them."
                    )
                part = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
                module.register_parameter(path, nn.Parameter(part, weight.requires_grad))
            vars(module)["owners"] = Exchange(mesh)
        return self._holds(model)

    def reduce(self, params: Sequence[nn.Parameter], count: float | Tensor) -> None:
        gradients = [p.grad for p in params if p.grad is not None]
        self.sum_over_replicas([g for g in gradients if not isinstance(g, DTensor)])
        self.sum_over(self.layout["copies"], self.local([g for g in gradients if isinstance(g, DTensor)]))
