"""Sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198), used with tensor parallelism.

Ranks hold successive parts of the sequence, dimension 1, where neither columns nor rows are divided: at norms, dropout
and sums.

A tensor divided this way is a DTensor, any other a plain tensor: torch lets no operation mix them.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from trainer.compat.fake import unset_fake_temporarily
from trainer.compat.pytree import tree_map
from trainer.runtime.seeding import derive

PARTS = (Shard(1),)
WHOLE = (Replicate(),)
ELEMENTWISE = (nn.LayerNorm, nn.RMSNorm, nn.Dropout)  # these act on each element of the sequence separately


class Scatter(ParallelStyle):
    """Divides the module's output along the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda _, args, output: _parts(output, device_mesh))
        return module


class Gather(ParallelStyle):
    """Makes the module's input whole."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, *inputs: tree_map(_whole, inputs), with_kwargs=True)
        return module


class Columns(ColwiseParallel):
    """Divides the columns of a layer, whose input may be divided along the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return super()._apply(Gather()._apply(module, device_mesh), device_mesh)


class RowsScatter(RowwiseParallel):
    """Divides the rows of a layer, and its output along the sequence: a reduce-scatter instead of an all-reduce."""

    def __init__(self) -> None:
        super().__init__(output_layouts=PARTS[0], use_local_output=False)


class Elementwise(ParallelStyle):
    """Runs a norm or a dropout on each rank's part of the sequence.

    torch's SequenceParallel would train a frozen norm, and drop the same positions on all ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, p in module.named_parameters():
            replica = distribute_tensor(p.detach(), device_mesh, WHOLE, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(replica, p.requires_grad))
        if isinstance(module, nn.Dropout):
            module.forward = partial(_dropout, module, module.forward)  # type: ignore[assignment]
        module.register_forward_pre_hook(lambda _, args: tree_map(partial(_parts, mesh=device_mesh), args))
        return module


def _parts(value: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, mesh, WHOLE, run_check=False)
    return value.redistribute(placements=PARTS)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _dropout(module: nn.Dropout, forward: Callable[[Tensor], Tensor], x: DTensor) -> DTensor:
    if not module.training:
        return x
    with _draws_of_its_own(x.device_mesh.get_local_rank(), x.device):
        local = forward(x.to_local())
    return DTensor.from_local(local, x.device_mesh, PARTS, run_check=False, shape=x.shape, stride=x.stride())


@contextmanager
def _draws_of_its_own(rank: int, device: torch.device) -> Iterator[None]:
    """Draws random numbers that differ between ranks within the block; afterwards all ranks draw alike again."""
    with unset_fake_temporarily():  # a memory estimate has tensors without values
        seed = derive(int(torch.randint(2**62, ())), "sequence", rank)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
