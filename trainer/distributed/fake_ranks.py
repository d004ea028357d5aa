"""Ranks that train fake tensors, for an estimate: their collectives give shapes, and send nothing.

With `fake_collectives` torch's have kernels for tensors without storage, which no process group hears of. So a rank
takes the groups that it has; a process that is alone has torch's "fake" group of any size around it for the while.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from trainer.config import ParallelConfig
from trainer.distributed import member
from trainer.distributed.join import kind_of
from trainer.distributed.member import Member, Page
from trainer.errors import ConfigError
from trainer.ranks import ALONE, Solo

_HOST = torch.device("cpu")


def rehearsals(config: ParallelConfig) -> Generator[Solo]:
    """This process's part; of one that is no rank, one after another the parts of ranks among which the largest is.

    Raises ConfigError where ranks divide the model in a way that fake tensors cannot follow.
    """
    if config.ranks == 1:
        yield ALONE
        return
    if config.pipeline > 1 or config.offload:
        of = "what a stage needs, which waits for others," if config.pipeline > 1 else "what is not offloaded"
        raise ConfigError(
            f"train.parallel.{'pipeline' if config.pipeline > 1 else 'offload'} is set, and {of} cannot be estimated: "
            "leave train.memory_limit out, and set train.micro_batch_size to a number."
        )
    import torch.distributed._tools.fake_collectives  # noqa: F401 - registers them

    if member.this() is not None:
        with _meshes():
            yield _own(config)  # type: ignore[arg-type]
        return
    # Where each parameter is divided, the first rank has the larger part; of the whole ones of zero1 any may have more.
    for rank in range(config.ranks) if config.shard == "zero1" else (0,):
        yield from _played(config, rank)


@cache
def _own(config: ParallelConfig) -> Solo:
    this = member.this()
    assert this is not None
    return kind_of(config)(config, this, _HOST)


def _played(config: ParallelConfig, rank: int) -> Iterator[Solo]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch's, which names the rank, stays behind otherwise
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.ranks)
    try:
        with tempfile.TemporaryFile() as page, _meshes():
            yield kind_of(config)(config, Member(rank, config.ranks, Page(page.fileno(), config.ranks)), _HOST)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@contextmanager
def _meshes() -> Iterator[None]:
    """Meshes that FSDP makes on the way, of two others, are of numbers: it looks up its place in them."""
    made: Any = DeviceMesh._concatenate

    def concatenated(meshes: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return made(meshes)

    DeviceMesh._concatenate = staticmethod(concatenated)  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceMesh._concatenate = staticmethod(made)  # type: ignore[method-assign]
