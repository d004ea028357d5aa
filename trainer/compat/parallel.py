"""Names private parts of torch's distributed package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from trainer.compat.private import private


def shape_and_offset(shape: Any, mesh: DeviceMesh, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of this rank's part of a tensor and its offsets."""
    return private("torch.distributed.tensor._utils:compute_local_shape_and_global_offset", seen="2.13")(
        shape, mesh, placements
    )


def register_fake_collectives() -> None:
    """Lets tensors without data pass through collectives."""
    private("torch.distributed._tools.fake_collectives:__name__", seen="2.13")


def fake_store() -> Any:
    """Returns a store for a process group of ranks that do not exist."""
    return private("torch.testing._internal.distributed.fake_pg:FakeStore", seen="2.13")()


def all_to_all(rows: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
    """Returns the rows that the ranks of a group have sent to this one, which sends `sent[k]` of `rows` to rank k.

    It takes gradients back the same way.
    """
    exchanged = private("torch.distributed._functional_collectives:all_to_all_single_autograd", seen="2.13")
    return exchanged(rows, received, sent, group)


def timed_of(ddp: Any) -> dict[str, Any]:
    """Returns DDP's measurements of its passes (torch 2.13)."""
    return ddp._get_ddp_logging_data()


@contextmanager
def concatenating(around: Callable[[Callable[[list[DeviceMesh]], DeviceMesh]], Any]) -> Iterator[None]:
    """Wraps torch's concatenation of meshes by `around` within the block."""
    made = private("torch.distributed.device_mesh:DeviceMesh._concatenate", seen="2.13")
    meshes: Any = DeviceMesh
    meshes._concatenate = staticmethod(around(made))
    try:
        yield
    finally:
        meshes._concatenate = staticmethod(made)
